"""benchmarks/peers: the peer's side of the protocol, and what llama-server is sent and how it is read."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.peers import SAMPLING, Opening, Peer
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, PeerError
from paceline.params import SamplingParams

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
OPENING = Opening("some.gguf", 2048, 2, 2, (256,))

NOISY = """
    import os, sys
    sys.path.insert(0, {peers!r})
    from protocol import Answer, serve

    class Letters:
        def __init__(self, opening):
            print("loading shards: 100 %")
            os.system("echo a child says so too")
            self.facts = {{"engine": "letters 2.0", "asked for": opening.max_seqs}}

        def run(self, requests, concurrency):
            os.write(1, b"a library writes past sys.stdout\\n")
            for one in requests:
                one.refuse("top_k", "min_tokens", why="letters have no ranks")
            if requests[0].text == "crash":
                raise ValueError("no such letter")
            return [Answer(one.id, 1, one.text[:1], "stop", seconds=0.002, prefill_seconds=0.001) for one in requests]

        def close(self):
            open({closed!r}, "w").close()

    serve(Letters)
"""

# A llama-server that answers with three tokens, the last of which is an end token, and keeps what it was sent.
FAKE_SERVER = """
    import http.server, json, os, sys
    if "--version" in sys.argv:
        print("version: 1 (fake)")
        sys.exit()
    folder = os.path.dirname(os.path.abspath(__file__))
    with open(folder + "/started", "w") as file:
        json.dump({{"argv": sys.argv[1:], "session": os.getsid(0), "pid": os.getpid()}}, file)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def say(self, message):
            body = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.say({{"status": "ok"}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with open(folder + "/sent", "a") as file:
                file.write(json.dumps(body) + "\\n")
            reply = {{"content": "ab", "tokens": [97, 98, {last}], "stop_type": "eos", "truncated": False}}
            self.say({{**reply, "timings": {{"predicted_ms": 0.1, "draft_n": 4, "draft_n_accepted": 1}}}})

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def ask(text: str = "hello", **options: Any) -> Ask:
    return Ask(Question("q7", "a", text), (1, 2, 3), SamplingParams(**{"max_tokens": 4, "seed": 5, **options}))


def script(path: Path, source: str, **values: object) -> Path:
    path.write_text(textwrap.dedent(source.format(**values)), encoding="utf-8")
    return path


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[Callable[[], Peer]]:
    """Opens a peer that writes on stdout whenever it can; tmp_path/closed appears when it was closed in order."""
    path = script(tmp_path / "letters.py", NOISY, peers=str(PEERS), closed=str(tmp_path / "closed"))
    opened: list[Peer] = []

    def open_one() -> Peer:
        opened.append(Peer("letters", [sys.executable, str(path)], OPENING, seconds=30.0))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_noise_on_stdout_does_no_harm(letters: Callable[[], Peer], tmp_path: Path) -> None:
    """Catches a library's or a child's line taken for an answer, and an engine that is not closed at the end."""
    with letters() as one:
        _, results = one.run([ask("hello"), ask("abc")], 2)
        about = one.describe()
        assert not (tmp_path / "closed").exists()
    assert [(r.text, r.tokens, r.finish_reason, r.speculation) for r in results] == [
        ("h", 1, "stop", None),
        ("a", 1, "stop", None),
    ]
    assert results[0].decode_seconds == pytest.approx(0.001)
    assert (about["engine"], about["asked for"]) == ("letters 2.0", 2)
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"top_k": 3}, r"says: top_k=3: letters have no ranks; possible here: 0"),
        ({"min_tokens": 2}, r"says: min_tokens=2: letters"),
        ({"text": "crash"}, r"says: ValueError: no such letter"),
        ({"max_tokens": None}, r"says: max_tokens=None: an answer without a limit"),
    ],
)
def test_what_cannot_be_done_is_said(letters: Callable[[], Peer], asked: dict[str, Any], said: str) -> None:
    """Catches options that are dropped without a word, and a peer that dies where it should say why."""
    with letters() as one, pytest.raises(PeerError, match=said):
        one.run([ask(**asked)], 1)


def test_a_field_of_a_later_version_is_refused(letters: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a peer that ignores an option it has never heard of: its numbers would be another benchmark's."""
    monkeypatch.setattr("paceline.bench.peers.SAMPLING", (*SAMPLING, "logit_bias"))
    with letters() as one, pytest.raises(PeerError, match=r"unknown fields \['logit_bias'\]"):
        one.run([ask()], 1)


def test_a_refusal_is_told_from_a_failure(tmp_path: Path) -> None:
    """Catches a peer that is given up for all jobs where it could not do one of them, and the reverse."""
    path = script(tmp_path / "letters.py", NOISY, peers=str(PEERS), closed=str(tmp_path / "closed"))
    opening = {"type": "open", "protocol": 1, "model": "m", "max_len": 64, "max_seqs": 1, "threads": 1}
    row = {name: getattr(SamplingParams(max_tokens=4), name) for name in SAMPLING}
    row |= {"id": 0, "question_id": "q", "text": "abc", "prompt_token_ids": [1], "stop_token_ids": []}
    rows = [row | {"top_k": 3}, row | {"text": "crash"}, {**row, "logit_bias": {}}, row]
    jobs = [{"type": "job", "job": i, "concurrency": 1, "requests": [one]} for i, one in enumerate(rows)]
    lines = "".join(json.dumps(one) + "\n" for one in [opening | {"stop_token_ids": []}, *jobs])
    done = subprocess.run([sys.executable, str(path)], input=lines, capture_output=True, text=True, timeout=30)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["type"], one.get("job"), one.get("refused")) for one in said] == [
        ("ready", None, None),
        ("error", 0, True),
        ("error", 1, None),
        ("error", 2, True),
        ("result", 3, None),
    ]


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script as a module."""
    monkeypatch.syspath_prepend(str(PEERS))
    return importlib.import_module(name)


def test_the_clock_starts_behind_the_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches seconds that count what docs/bench.md leaves out: from having read the job."""
    protocol = loaded("protocol", monkeypatch)
    events: list[str] = []

    class Engine:
        def run(self, requests: Sequence[Any], concurrency: int) -> list[Any]:
            events.append("run")
            return []

    monkeypatch.setattr(protocol, "read_request", lambda row: events.append("read"))
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: events.append("clock") or 0.0)
    protocol._answered(Engine(), {"job": 1, "concurrency": 1, "requests": [{}, {}]})
    assert events == ["read", "read", "clock", "run", "clock"]


@pytest.mark.parametrize(
    "threads, cpus", [(None, [0, 1, 4]), (1, [0]), (2, [0, 1]), (4, [0, 1, 4, 2]), (9, [0, 1, 4, 2, 3])]
)
def test_vllm_takes_cores_before_hyperthreads(
    threads: int | None, cpus: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two threads bound to one core while another is free. CPUs 0 and 2, 1 and 3 are siblings."""
    module = loaded("vllm_peer", monkeypatch)
    for cpu, siblings in {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3", 4: "4"}.items():
        (tmp_path / f"cpu{cpu}").write_text(siblings)

    def place(text: str) -> Path:
        return tmp_path / text.split("/")[5]

    monkeypatch.setattr(module, "Path", place)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4}, raising=False)
    assert module.cpus_for(threads) == cpus


def test_the_llama_class_takes_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers one after another that are reported as those of two at once."""
    pytest.importorskip("llama_cpp")
    module = loaded("llama_cpp_peer", monkeypatch)
    with pytest.raises(loaded("protocol", monkeypatch).RefusedError, match=r"concurrency=2: .*possible here: 1"):
        module.LlamaClass.run(None, [], 2)


def test_an_engine_that_does_not_open_says_why(tmp_path: Path) -> None:
    """Catches "ended where 'ready' was due" in place of the reason."""
    broken = "import sys; sys.path.insert(0, {peers!r}); from protocol import serve; serve(lambda opening: 1 // 0)"
    path = script(tmp_path / "broken.py", broken, peers=str(PEERS))
    with pytest.raises(PeerError, match="says: ZeroDivisionError"):
        Peer("broken", [sys.executable, str(path)], OPENING, seconds=30.0)


@contextmanager
def served(folder: Path, *options: str, last: int = 256) -> Iterator[Peer]:
    """llama_server_peer.py in front of a fake server, whose answers end with the token `last`."""
    server = script(folder / "server.py", f"#!{sys.executable}\n" + textwrap.dedent(FAKE_SERVER), last=last)
    server.chmod(0o755)
    command = [sys.executable, str(PEERS / "llama_server_peer.py"), "--server", str(server), *options]
    with Peer("server", command, OPENING, seconds=30.0) as one:
        yield one


def sent(folder: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sent").read_text().splitlines()]


def test_llama_server_gets_the_ids_and_nothing_else_switched_on(tmp_path: Path) -> None:
    """Catches its defaults (top_k 40, top_p 0.95, min_p 0.05, prompts kept) in a comparison with ours; wrong counts."""
    with served(tmp_path, "--kind", "ngram-simple", "--ngram", "3", "--draft", "5") as one:
        _, results = one.run([ask(temperature=0.7), ask(temperature=0.7, seed=6)], 2)
        started = json.loads((tmp_path / "started").read_text())
        assert started["session"] in one.sessions  # else the guard takes its load for somebody else's
        about = one.describe()
    bodies = sorted(sent(tmp_path), key=lambda body: body["seed"])
    expected = {"prompt": [1, 2, 3], "n_predict": 4, "temperature": 0.7, "cache_prompt": False, "ignore_eos": False}
    expected |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "typical_p": 1.0, "mirostat": 0}
    assert [body["seed"] for body in bodies] == [5, 6]
    assert all({name: body[name] for name in expected} == expected for body in bodies)
    assert set(bodies[0]["samplers"]) == {"temperature", "top_k", "top_p", "min_p"}
    for flags in (
        ["--spec-type", "ngram-simple"],
        ["--spec-ngram-simple-size-n", "3"],
        ["--ctx-size", "4096"],
        ["--threads", "2"],
    ):
        at = started["argv"].index(flags[0])
        assert started["argv"][at : at + 2] == flags
    assert [(r.tokens, r.text, r.finish_reason) for r in results] == [(2, "ab", "stop")] * 2  # without the end token
    counts = results[0].speculation
    assert counts is not None
    assert (counts.steps, counts.drafted, counts.accepted) == (2, 4, 1)
    assert about["engine"] == "llama-server 1 (fake)"
    with pytest.raises(ProcessLookupError):
        os.kill(started["pid"], 0)


def test_llama_server_must_end_where_we_do(tmp_path: Path) -> None:
    """Catches a model whose end tokens in llama.cpp are others than those we stop at: answers of other lengths."""
    with (
        served(tmp_path, last=77) as one,
        pytest.raises(PeerError, match="ends at the model's end tokens only; here at 77"),
    ):
        one.run([ask()], 1)


def test_llama_server_is_as_fast_as_it_can_be_when_greedy(tmp_path: Path) -> None:
    """Catches filters that go over the whole vocabulary for the token with the highest logit, and a request's own
    top_k in place of the highest."""
    with served(tmp_path) as one:
        one.run([ask(temperature=0.0), ask(temperature=0.0, top_k=7, top_p=0.5)], 1)
    assert [(body["samplers"], body["top_k"]) for body in sent(tmp_path)] == [(["top_k"], 1)] * 2


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.2}, {"min_tokens": 2}])
def test_llama_server_refuses_what_it_does_otherwise(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Catches a penalty with another meaning under the same name."""
    with served(tmp_path) as one, pytest.raises(PeerError, match=f"says: {next(iter(asked))}="):
        one.run([ask(**asked)], 1)
    assert not (tmp_path / "sent").exists()
