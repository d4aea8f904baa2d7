"""Peers: what they are told, what they may say, and how they end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.bench.peers import Opening, Peer, check_sampling, parse_peer
from paceline.bench.prompts import Question
from paceline.bench.runs import Ask, PeerError
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

SCRIPT = str(Path(__file__).with_name("example_peer.py"))
OPENING = Opening("some.gguf", 2048, 4, 2, (256,))


def peer(*how: str, seconds: float = 30.0) -> Peer:
    return Peer("letters", [sys.executable, SCRIPT, *how], OPENING, seconds=seconds)


def ask(text: str = "hello", **options: object) -> Ask:
    return Ask(Question("q7", "a", text), (1, 2, 3), SamplingParams(max_tokens=4, seed=5, **options))  # type: ignore[arg-type]


def test_a_peer_answers_what_it_is_asked() -> None:
    """Catches answers given to the wrong request, and counts that get lost on the way."""
    with peer() as one:
        seconds, results = one.run([ask("hello"), ask("ab")], 2)
        again, _ = one.run([ask("x")], 1)
        about = one.describe()
        session = os.getsid(one._process.pid)
    assert seconds > 0
    assert again > 0
    assert [(r.question_id, r.text, r.tokens, r.prompt_tokens) for r in results] == [
        ("q7", "hell", 4, 3),
        ("q7", "ab", 2, 3),
    ]
    assert results[0].decode_tokens == 3  # the first one came with the prompt
    assert results[0].decode_seconds is not None
    assert results[0].speculation is not None
    assert results[0].speculation.tokens_per_step == 1.0
    assert about["engine"] == "letters 1.0"
    assert about["model"] == "some.gguf"
    assert about["peer"] is True
    assert one.sessions == (session,)  # by which the guard knows its load
    one.close()  # once more does nothing


def test_what_a_peer_does_not_know_is_unknown() -> None:
    """Catches tokens per step made up for a peer that counts no steps."""
    with peer("keeps_some") as one:
        (result,) = one.run([ask()], 1)[1]
    assert result.speculation is None


@pytest.mark.parametrize(
    "how, said",
    [
        ("dies", r"ended \(exit status 3\) where 'result' was due; its stderr ends: out of memory"),
        ("refuses", "says: top_k is not for me"),
        ("noise", "wrote 'loading shards: 100 %', which is no JSON"),
        ("another_job", "answered job 99"),
        ("liar", "says that a job took 1000.0 s"),
        ("too_long", "gave 10000 tokens"),
        ("half", "answered job 1 with 0 results"),
        ("untyped", "gave a result with a field missing or of another type"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_named_and_ended(how: str, said: str) -> None:
    """Catches numbers taken from a peer that did something else than it was asked."""
    one = peer(how)
    with pytest.raises(PeerError, match=f"^peer letters {said}"):
        one.run([ask()], 1)
    assert one._process.poll() is not None


def test_a_peer_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that waits for ever, and a process that is left behind."""
    monkeypatch.setattr("paceline.bench.peers.CLOSE_SECONDS", 0.1)
    one = peer("hangs", seconds=1.0)
    with pytest.raises(PeerError, match="gave no 'result' within 1 s"):
        one.run([ask()], 1)
    assert one._process.poll() is not None


@pytest.mark.parametrize(
    "how, said", [("newer", "speaks protocol 2, this is 1"), ("silent", "gave no 'ready' within 1")]
)
def test_a_peer_that_does_not_start_well(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a peer of another version being measured."""
    monkeypatch.setattr("paceline.bench.peers.CLOSE_SECONDS", 0.1)
    with pytest.raises(PeerError, match=said):
        peer(how, seconds=1.5)


def test_a_peer_that_stays_is_killed() -> None:
    """Catches processes left behind."""
    one = peer("stays")
    one.close(patience=0.2)
    assert one._process.poll() is not None


def test_a_command_that_is_none() -> None:
    """Catches an operating system's traceback."""
    with pytest.raises(PeerError, match="peer ghost: /nowhere/at/all cannot be started"):
        Peer("ghost", ["/nowhere/at/all"], OPENING)


def test_a_peer_is_told_everything_that_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option that is ours alone: then the comparison is of different tasks."""
    sent: list[dict[str, object]] = []
    with peer() as one:
        real = one._send
        monkeypatch.setattr(one, "_send", lambda message: (sent.append(dict(message)), real(message)))
        one.run([ask(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)], 1)
        one.run([ask(ignore_eos=True)], 1)
    first, second = (job["requests"][0] for job in sent[:2])  # type: ignore[index]
    wanted = {
        "id": 0, "question_id": "q7", "text": "hello", "prompt_token_ids": [1, 2, 3], "stop_token_ids": [256],
        "max_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 5, "ignore_eos": False, "min_tokens": 0,
    }  # fmt: skip
    assert first == wanted
    assert (second["ignore_eos"], second["stop_token_ids"]) == (True, [])


def test_options_without_a_field_are_refused() -> None:
    """Catches a peer that is compared without an option that we have to honour."""
    check_sampling(SamplingParams(temperature=0.5, top_k=3, seed=1, verification="block"))
    with pytest.raises(InvalidParams, match="other sampling options are for us alone"):
        check_sampling(SamplingParams(stop=["x"]))


@pytest.mark.parametrize("text", ["vllm", "=python x.py", "vllm=", "vllm='unclosed"])
def test_a_peer_needs_a_name_and_a_command(text: str) -> None:
    """Catches an index error for a typing error."""
    with pytest.raises(InvalidParams, match="NAME=COMMAND"):
        parse_peer(text)


def test_commands_are_split_as_in_a_shell() -> None:
    """Catches paths with spaces that fall apart, and an = in the command that does."""
    assert parse_peer("a b='my venv/python' p.py --x=1") == ("a b", ["my venv/python", "p.py", "--x=1"])
