"""A peer in its smallest form, with nothing but the standard library; docs/bench.md has the protocol.

It "generates" the question's letters. An argument makes it misbehave, for the tests.
"""

from __future__ import annotations

import json
import sys
import time


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def answer(request: dict[str, object]) -> dict[str, object]:
    start = time.perf_counter()
    text = str(request["text"])[: int(str(request["max_tokens"]))]
    time.sleep(0.001)
    return {
        "id": request["id"],
        "text": text,
        "tokens": len(text),
        "finish_reason": "length",
        "seconds": time.perf_counter() - start,
        "prefill_seconds": 0.0001,
        "steps": len(text),
        "drafted": 0,
        "accepted": 0,
    }


def misbehave(how: str, reply: dict[str, object]) -> None:
    """One way of breaking the protocol in the answer to a job."""
    if how == "dies":
        print("out of memory, as it seems", file=sys.stderr)
        sys.exit(3)
    if how == "refuses":
        say({"type": "error", "job": reply["job"], "message": "top_k is not for me"})
    elif how == "noise":
        print("loading shards: 100 %", flush=True)
    elif how == "hangs":
        time.sleep(60)
    elif how == "another_job":
        say({**reply, "job": 99})
    elif how == "liar":
        say({**reply, "seconds": 1000.0})
    elif how == "too_long":
        results = [{**one, "tokens": 10_000} for one in reply["results"]]  # type: ignore[attr-defined]
        say({**reply, "results": results})
    elif how == "half":
        say({**reply, "results": []})
    elif how == "untyped":
        say({**reply, "results": [{"id": 0}]})
    elif how == "keeps_some":
        say({**reply, "results": [{k: v for k, v in one.items() if k != "steps"} for one in reply["results"]]})  # type: ignore[attr-defined]


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    opening = json.loads(sys.stdin.readline())
    if how == "silent":
        time.sleep(60)
    say({"type": "ready", "protocol": 2 if how == "newer" else 1, "engine": "letters 1.0", "model": opening["model"]})
    for line in sys.stdin:
        job = json.loads(line)
        if job["type"] == "close":
            break
        start = time.perf_counter()
        results = [answer(request) for request in job["requests"]]
        seconds = time.perf_counter() - start
        reply = {"type": "result", "job": job["job"], "seconds": seconds, "results": results}
        if how:
            misbehave(how, reply)
        else:
            say(reply)
    if how == "stays":
        time.sleep(60)


if __name__ == "__main__":
    main()
