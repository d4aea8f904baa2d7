"""llama-server of llama.cpp as a peer, with one of its own kinds of speculation. build_llama_server.sh builds it.

    paceline bench compare -m smollm2 \
        --peer 'llama-server=python benchmarks/peers/llama_server_peer.py --server FOLDER/bin/llama-server --kind none'

Standard library only. The server is a child of this process, in its session, and ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Answer, Opening, RefusedError, Request, core_count, serve

KINDS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
REMEMBERS = ("ngram-mod", "ngram-cache")  # these draft from earlier requests too, and nothing switches that off
START_SECONDS = 300.0
FIELDS = ["content", "tokens", "stop_type", "truncated", "timings"]


class Server:
    """See protocol.Engine."""

    def __init__(self, options: argparse.Namespace, opening: Opening) -> None:
        self.seqs, threads = opening.max_seqs, str(opening.threads or core_count())
        self.port = free_port()
        self.local = threading.local()  # each thread keeps its connection
        command = [
            *(
                options.server,
                "--model",
                options.model or opening.model,
                "--host",
                "127.0.0.1",
                "--port",
                str(self.port),
            ),
            *("--parallel", str(self.seqs), "--ctx-size", str(self.seqs * opening.max_len)),  # it is divided among them
            *("--threads", threads, "--threads-batch", threads),
            *("--cache-ram", "0", "--fit", "off", "--offline", "--no-ui", "--log-verbosity", "1"),
            *speculation(options.kind, options.ngram, options.draft),
        ]
        self.facts = {
            "engine": f"llama-server {version(options.server)}",
            "threads": threads,
            "kind": options.kind,
            "ngram": options.ngram,
            "draft": options.draft,
            "drafts from": "earlier requests too" if options.kind in REMEMBERS else "the request itself",
        }
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Until the model is loaded. Raises RuntimeError where the server ends, or is not ready in time."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.process.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready within {START_SECONDS:g} s")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON. A connection that failed is not used again."""
        link: http.client.HTTPConnection | None = getattr(self.local, "link", None)
        if link is None:
            link = http.client.HTTPConnection("127.0.0.1", self.port)
        self.local.link = None
        link.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        response = link.getresponse()
        content = json.loads(response.read())
        self.local.link = link
        return response.status, content

    def run(self, requests: Sequence[Request], concurrency: int) -> list[Answer]:
        if concurrency > self.seqs:
            raise RefusedError(f"concurrency {concurrency}: llama-server was started for {self.seqs} at most")
        bodies = [completion(request) for request in requests]
        with ThreadPoolExecutor(concurrency) as threads:
            return list(threads.map(self.answer, requests, bodies))

    def answer(self, request: Request, body: dict[str, Any]) -> Answer:
        start = time.perf_counter()
        status, reply = self.ask("POST", "/completion", body)
        seconds = time.perf_counter() - start
        if status != 200:
            raise RuntimeError(f"llama-server says {status}: {reply}")
        return read_answer(request, reply, seconds)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def completion(request: Request) -> dict[str, Any]:
    """The body of POST /completion: every sampler off that is on by default, and ours in our order.

    ignore_eos bans the end tokens there, where we read past them: an answer of the same length, but another text.
    Greedily top_k=1 finds the same token as temperature=0, without every filter going over the whole vocabulary first.
    """
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    request.refuse(*penalties, why="llama-server looks at the last 64 tokens of prompt and answer alike")
    request.refuse("min_tokens", why="llama-server has no such option")
    body: dict[str, Any] = {
        "prompt": list(request.prompt_token_ids),
        "n_predict": request.max_tokens,
        "cache_prompt": False,
        "stream": False,
        "return_tokens": True,
        "response_fields": FIELDS,
        "ignore_eos": request.ignore_eos,
        "seed": -1 if request.seed is None else request.seed % (2**32 - 1),
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "min_p": request.min_p,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
    }
    off: dict[str, Any] = {"typical_p": 1.0, "xtc_probability": 0.0, "top_n_sigma": -1.0, "dynatemp_range": 0.0}
    off |= {
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "mirostat": 0,
    }
    if request.temperature == 0:
        off |= {"samplers": ["top_k"], "top_k": 1}
    return body | off


def read_answer(request: Request, reply: dict[str, Any], seconds: float) -> Answer:
    """Its reply as an answer. Raises RefusedError where it did not end as asked.

    It counts no steps, but each makes one token more than it accepts. What it drafted behind the end of the answer may
    be among the accepted ones.
    """
    ids, timings, stop = reply["tokens"], reply["timings"], set(request.stop_token_ids)
    ended = reply["stop_type"] == "eos"
    kept = ids[:-1] if ended else ids
    if reply["truncated"] or timings.get("cache_n"):
        raise RefusedError(f"llama-server cut the text or reused a prompt: {timings}")
    if (ended and ids[-1] not in stop) or stop.intersection(kept):
        ends = f"llama-server ends at the model's end tokens only; here at {ids[-1]}"
        raise RefusedError(f"stop_token_ids={sorted(stop)}: {ends}")
    accepted = timings.get("draft_n_accepted", 0)
    return Answer(
        id=request.id,
        tokens=len(kept),
        text=reply["content"],
        finish_reason="stop" if ended else "length",
        seconds=seconds,
        prefill_seconds=max(0.0, seconds - timings["predicted_ms"] / 1000),
        steps=max(1, len(ids) - accepted),
        drafted=timings.get("draft_n", 0),
        accepted=accepted,
    )


def speculation(kind: str, ngram: int | None, draft: int | None) -> list[str]:
    """The flags. ngram: tokens looked up; draft: tokens drafted; None: the server's own defaults."""
    if kind in ("none", "ngram-cache"):
        if ngram is not None or draft is not None:
            raise RefusedError(f"--kind {kind} has no sizes; --ngram and --draft are for the others")
        return ["--spec-type", kind]
    names = {"size-n": ngram, "size-m": draft}
    if kind == "ngram-mod":  # by default it drops drafts shorter than 48
        names = {"n-match": ngram, "n-max": draft, "n-min": None if draft is None else 1}
    flags = [[f"--spec-{kind}-{name}", str(value)] for name, value in names.items() if value is not None]
    return ["--spec-type", kind, *(word for pair in flags for word in pair)]


def version(server: str) -> str:
    """What the server says it is."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: *(.+)", said.stdout + said.stderr)
    return found[1].strip() if found else "of unknown version"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def die_with_parent() -> None:
    """In the child: Linux ends it when this process ends, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="path of llama-server")
    parser.add_argument("--kind", choices=KINDS, default="none", help="of speculation (none)")
    parser.add_argument("--ngram", type=int, help="tokens that must be found again (the server's default)")
    parser.add_argument("--draft", type=int, help="tokens drafted at most (the server's default)")
    parser.add_argument("--model", help="a GGUF file other than the one that Paceline opened")
    serve(functools.partial(Server, parser.parse_args()))


if __name__ == "__main__":
    main()
