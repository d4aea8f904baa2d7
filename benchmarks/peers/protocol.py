"""The peer's side of the protocol in docs/bench.md, for the scripts beside it. Standard library only.

    serve(open_engine)      open_engine(Opening) gives an Engine, which makes an Answer of every Request

A script is run as a file: `from protocol import ...` finds this one beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROTOCOL = 1
OFF: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": False,
}


class RefusedError(Exception):
    """What is asked cannot be done as asked; the message says why. Other jobs may be answered."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The target as Paceline opened it. threads: None where nobody chose."""

    model: str
    max_len: int
    max_seqs: int
    threads: int | None
    stop_token_ids: tuple[int, ...]


def core_count() -> int:
    """Physical cores this process may run on: the threads to take where the opening has none. Engines' own defaults
    differ (all logical processors, half of them), and a comparison would be of that. Paceline counts the same way, and
    takes no more than its cgroup allows, which is not looked at here: say --threads in a container."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu),))
    return len(cores)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to answer it; OFF has the values that switch an option off. temperature 0 is greedy.
    stop_token_ids is empty with ignore_eos. seed: None where nobody chose."""

    id: int
    question_id: str
    text: str
    prompt_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    ignore_eos: bool

    def refuse(self, *options: str, why: str) -> None:
        """Raise RefusedError where one of these options is not off: they cannot be honoured here, and why."""
        for name in options:
            if getattr(self, name) != OFF[name]:
                raise RefusedError(f"{name}={getattr(self, name)!r}: {why}; possible here: {OFF[name]!r}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's tokens: how many, without the id that ended it. seconds, prefill_seconds: from its start to its end
    and to its first token. steps, drafted, accepted: all three or none."""

    id: int
    tokens: int
    text: str
    finish_reason: str  # stop | length
    seconds: float | None = None
    prefill_seconds: float | None = None
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None


def refuse_many(concurrency: int) -> None:
    """Raise RefusedError where more than one is asked at once: for who could only answer them one after another."""
    if concurrency > 1:
        raise RefusedError(f"concurrency={concurrency}: here one request is answered after another; possible here: 1")


class Engine(Protocol):
    """facts: for the report; "engine" (name and version) must be among them."""

    facts: dict[str, Any]

    def run(self, requests: Sequence[Request], concurrency: int) -> Sequence[Answer]:
        """Answers to all requests, at most `concurrency` at once, in any order. Whatever it raises goes to the one who
        asked as an error."""

    def close(self) -> None: ...


def read_request(row: Mapping[str, Any]) -> Request:
    """Raises RefusedError for a field this side does not know: it may change the answer."""
    known = {field.name for field in dataclasses.fields(Request)}
    if set(row) != known:
        unknown, missing = sorted(set(row) - known), sorted(known - set(row))
        raise RefusedError(f"a request with unknown fields {unknown} and without {missing}; known: {sorted(known)}")
    ids = {name: tuple(row[name]) for name in ("prompt_token_ids", "stop_token_ids")}
    if row["max_tokens"] is None:
        raise RefusedError("max_tokens=None: an answer without a limit cannot be compared; say how many")
    return Request(**{**row, **ids})


def read_opening(row: Mapping[str, Any]) -> Opening:
    """Raises RefusedError where the protocol is another one."""
    if row.get("type") != "open" or row.get("protocol") != PROTOCOL:
        raise RefusedError(f"{row.get('type')!r} of protocol {row.get('protocol')!r}; known here: 'open' of {PROTOCOL}")
    fields = {field.name: row[field.name] for field in dataclasses.fields(Opening)}
    return Opening(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})


def serve(open_engine: Callable[[Opening], Engine]) -> None:
    """Answer until told to close, or until stdin ends. What else is written on stdout, by libraries and by child
    processes too, goes to stderr. Exit status 1 where the engine cannot be opened."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def say(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        engine = open_engine(read_opening(json.loads(sys.stdin.readline())))
    except Exception as error:
        say({"type": "error", "job": None, "message": _message(error)})
        sys.exit(1)
    try:
        say({"type": "ready", "protocol": PROTOCOL, **engine.facts})
        for line in sys.stdin:
            job = json.loads(line)
            if job["type"] == "close":
                break
            say(_answered(engine, job))
    finally:
        engine.close()


def _answered(engine: Engine, job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        requests = [read_request(row) for row in job["requests"]]
        start = time.perf_counter()
        answers = engine.run(requests, job["concurrency"])
        seconds = time.perf_counter() - start
        results = [{k: v for k, v in dataclasses.asdict(answer).items() if v is not None} for answer in answers]
    except RefusedError as error:
        return {"type": "error", "job": job["job"], "message": str(error), "refused": True}
    except Exception as error:
        return {"type": "error", "job": job["job"], "message": _message(error)}
    return {"type": "result", "job": job["job"], "seconds": seconds, "results": results}


def _message(error: Exception) -> str:
    if isinstance(error, RefusedError):
        return str(error)
    traceback.print_exception(error)  # on stderr
    return f"{type(error).__name__}: {error}"
