"""Peers: other engines, each a process of its own that speaks lines of JSON. docs/bench.md has the protocol.

we:    {"type": "open", "protocol": 1, "model", "max_len", "max_seqs", "max_step_tokens", "threads"}
peer:  {"type": "ready", "protocol": 1, "engine": "name and version", ...}        anything else is shown in reports
we:    {"type": "job", "job": 1, "concurrency": 1, "requests": [{"id", "prompt_token_ids", "max_tokens", ...}]}
peer:  {"type": "result", "job": 1, "seconds": 1.5, "results": [{"id", "tokens", "text", "finish_reason", ...}]}
  or:  {"type": "error", "job": 1, "message": "why"}                              with "refused": true, it goes on
we:    {"type": "close"}, and the end of its stdin
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import IO, Any, Self

from ..errors import InvalidParams
from ..params import SamplingParams
from ..types import SpeculationStats
from .runs import Ask, PeerError, RefusedError, Result

PROTOCOL = 1
CLOSE_SECONDS = 10.0
CLOCK_SLACK = 0.05  # seconds that a peer's clock may be ahead of ours
SHOWN = 600  # characters of a peer's stderr in an error
SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "ignore_eos", "min_tokens"),
)


@dataclass(frozen=True, slots=True)
class Opening:
    """What a peer is told about the target, so that both can run the same. It may know better by its own arguments.

    model: path or name. stop_token_ids: what ends an answer, unless a request ignores it.
    """

    model: str
    max_len: int
    max_seqs: int
    threads: int | None
    stop_token_ids: tuple[int, ...]


def parse_peer(text: str) -> tuple[str, list[str]]:
    """NAME=COMMAND as (name, argument list). Raises InvalidParams."""
    name, equals, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidParams(f"peer {text!r}: {error}; allowed: NAME=COMMAND, quoted as in a shell") from None
    if not equals or not name.strip() or not words:
        raise InvalidParams(f"peer {text!r}; allowed: NAME=COMMAND, as in vllm=venv/bin/python peer_vllm.py")
    return name.strip(), words


class Peer:
    """A contender in another process. Raises PeerError for whatever goes wrong with it; then it is closed. A job that
    it refuses is a RefusedError, and it stays open.

    seconds: how long it may take to start, and to answer one job.
    """

    def __init__(self, name: str, command: Sequence[str], opening: Opening, *, seconds: float = 600.0) -> None:
        self.name, self._command, self._seconds = name, list(command), seconds
        self._stop_ids = list(opening.stop_token_ids)
        self._job = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is ours to handle; and the guard knows its processes by their session
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"peer {name}: {shlex.join(command)} cannot be started: {error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[str] = self._process.stdin
        self._stdout: IO[str] = self._process.stdout
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._stdout,), daemon=True)
        self._reader.start()
        self.sessions = (self._process.pid,)
        try:
            self._send({"type": "open", "protocol": PROTOCOL, **_as_json(opening)})
            self._about = self._receive("ready")
            if self._about.get("protocol") != PROTOCOL:
                raise self._error(f"speaks protocol {self._about.get('protocol')!r}, this is {PROTOCOL}")
        except BaseException:
            self.close()
            raise

    def run(self, asks: Sequence[Ask], concurrency: int) -> tuple[float, tuple[Result, ...]]:
        """See Contender. seconds are the peer's own, which cannot be more than passed here."""
        self._job += 1
        requests = [self._request(i, ask) for i, ask in enumerate(asks)]
        start = perf_counter()
        try:
            self._send({"type": "job", "job": self._job, "concurrency": concurrency, "requests": requests})
            answer = self._receive("result")
            passed = perf_counter() - start
            return self._checked(answer, asks, passed)
        except RefusedError:
            raise
        except PeerError:
            self.close()
            raise
        except BaseException:  # an interrupt: it may be in the middle of a long job
            self.close(patience=1.0)
            raise

    def describe(self) -> dict[str, Any]:
        """Its command, and what it said about itself."""
        about = {key: value for key, value in self._about.items() if key not in ("type", "protocol")}
        return {"name": self.name, "peer": True, "command": shlex.join(self._command), **about}

    def close(self, *, patience: float | None = None) -> None:
        """Ask it to end; make it, with all its processes, if it does not within so many seconds
        (CLOSE_SECONDS where None). Idempotent."""
        if self._log.closed:
            return
        with suppress(PeerError, ValueError):
            self._send({"type": "close"})
        with suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS if patience is None else patience)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self._kill()
            raise
        finally:
            self._log.close()
            self._reader.join(1.0)
            if not self._reader.is_alive():  # else a process that it has left behind holds the other end
                self._stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _request(self, index: int, ask: Ask) -> dict[str, Any]:
        asked = {name: getattr(ask.params, name) for name in SAMPLING}
        return {
            "id": index,
            "question_id": ask.question.question_id,
            "text": ask.question.text,
            "prompt_token_ids": list(ask.ids),
            "stop_token_ids": [] if ask.params.ignore_eos else self._stop_ids,
            **asked,
        }

    def _read(self, lines: IO[str]) -> None:
        with suppress(OSError, ValueError):
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
        except OSError as error:
            raise self._error(f"does not listen any more ({error})") from None

    def _receive(self, kind: str) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._seconds)
        except queue.Empty:
            raise self._error(f"gave no {kind!r} within {self._seconds:g} s") from None
        if line is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            raise self._error(f"ended (exit status {self._process.poll()}) where {kind!r} was due")
        try:
            message = json.loads(line)
        except json.JSONDecodeError:
            raise self._error(
                f"wrote {line.strip()[:200]!r}, which is no JSON; its stdout is for the protocol"
            ) from None
        if isinstance(message, dict) and message.get("type") == "error":
            said = f"says: {message.get('message')}"
            if message.get("refused") is True and kind == "result" and message.get("job") == self._job:
                raise RefusedError(f"peer {self.name} {said}")
            raise self._error(said)
        if not isinstance(message, dict) or message.get("type") != kind:
            raise self._error(f"wrote {line.strip()[:200]!r} where {kind!r} was due")
        return message

    def _checked(
        self, answer: Mapping[str, Any], asks: Sequence[Ask], passed: float
    ) -> tuple[float, tuple[Result, ...]]:
        """A result that can be true: this job's, with an answer to every request and times within what passed."""
        try:
            seconds = float(answer["seconds"])
            rows = {int(row["id"]): row for row in answer["results"]}
            job, count = answer["job"], len(answer["results"])
            if job != self._job or count != len(asks) or set(rows) != set(range(len(asks))):
                ids = f"{count} results with ids {sorted(rows)}"
                raise self._error(f"answered job {job} with {ids}; asked was job {self._job}, {len(asks)} requests")
            results = tuple(self._result(ask, rows[i]) for i, ask in enumerate(asks))
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"gave a result with a field missing or of another type: {error!r}") from None
        if not 0 < seconds <= passed + CLOCK_SLACK:
            raise self._error(f"says that a job took {seconds} s; {passed:.3f} s passed here")
        return seconds, results

    def _result(self, ask: Ask, row: Mapping[str, Any]) -> Result:
        tokens, text = int(row["tokens"]), row["text"]
        most = ask.params.max_tokens
        if not isinstance(text, str) or not 0 <= tokens <= (tokens if most is None else most):
            raise self._error(
                f"gave {tokens} tokens and the text {text!r}; "
                f"allowed: 0 to {most}, as this job's max_tokens says, and a text"
            )
        prefill, whole = row.get("prefill_seconds"), row.get("seconds")
        return Result(
            question_id=ask.question.question_id,
            prompt_tokens=len(ask.ids),
            tokens=tokens,
            text=text,
            finish_reason=str(row["finish_reason"]),
            decode_seconds=None if prefill is None or whole is None else float(whole) - float(prefill),
            decode_tokens=None if prefill is None or whole is None else max(0, tokens - 1),
            speculation=_stats(row, tokens),
        )

    def _error(self, what: str) -> PeerError:
        said = ""
        if not self._log.closed:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - SHOWN))
            said = self._log.read().decode("utf-8", "replace").strip()
        return PeerError(f"peer {self.name} {what}" + (f"; its stderr ends: {said}" if said else ""))


def _as_json(opening: Opening) -> dict[str, Any]:
    return {
        "model": opening.model,
        "max_len": opening.max_len,
        "max_seqs": opening.max_seqs,
        "threads": opening.threads,
        "stop_token_ids": list(opening.stop_token_ids),
    }


def _stats(row: Mapping[str, Any], tokens: int) -> SpeculationStats | None:
    """Counts, where the peer has all of them."""
    if any(row.get(name) is None for name in ("steps", "drafted", "accepted")):
        return None
    return SpeculationStats(
        steps=int(row["steps"]), drafted=int(row["drafted"]), accepted=int(row["accepted"]), emitted=tokens
    )


def check_sampling(params: SamplingParams) -> None:
    """Raise InvalidParams for an option that the protocol has no field for."""
    plain = SamplingParams(**{name: getattr(params, name) for name in SAMPLING}, verification=params.verification)
    if plain != params:
        raise InvalidParams(f"peers are asked with {', '.join(SAMPLING)}; other sampling options are for us alone")
