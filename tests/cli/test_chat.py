"""`paceline chat`: turns, history, its commands, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from paceline import LLM, SamplingParams
from paceline.backend.toy import ALPHABET, ToyBackend

from .shell import PATIENCE, Terminal, error_line, paceline, started

BASE = ["chat", "--model", "toy", "--temperature", "0", "--max-tokens", "15", "--drafter", "model:toy"]
Conversation = list[dict[str, str]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("toy")


def reply(llm: LLM, messages: Conversation) -> str:
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=15))[0].outputs[0].text


def talk(llm: LLM, turns: list[str], system: str | None = None) -> list[str]:
    """What the library answers to these turns, one after another."""
    messages: Conversation = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(reply(llm, messages))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_lines_are_turns_of_one_conversation(llm: LLM) -> None:
    result = paceline(*BASE, stdin="hello\n\nhello\nbye")
    answers = talk(llm, ["hello", "hello", "bye"])
    assert answers[0] != answers[1], "the toy cannot tell whether history was kept"
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.exit_code == 0


def test_system(llm: LLM) -> None:
    assert paceline(*BASE, "--system", "be brief", stdin="hi\n").stdout == talk(llm, ["hi"], "be brief")[0] + "\n"


def test_reset_forgets_all_but_the_system_message(llm: LLM) -> None:
    once = talk(llm, ["hi"], "be brief")[0] + "\n"
    result = paceline(*BASE, "--system", "be brief", stdin="hi\n/reset\nhi\n")
    assert result.stdout == once + once


def test_quit_and_unknown_commands(llm: LLM) -> None:
    result = paceline(*BASE, stdin="/nonsense\nhi\n/quit\nhi\n")
    assert result.stdout == talk(llm, ["hi"])[0] + "\n"
    assert "no command /nonsense" in result.stderr
    assert paceline(*BASE, stdin="/etc/passwd\n").stdout == talk(llm, ["/etc/passwd"])[0] + "\n"


def test_stats_and_cuts_are_said_on_stderr() -> None:
    result = paceline(*BASE, "--stats", stdin="hi\n")
    assert "paceline: note: the answer was cut at --max-tokens" in result.stderr
    assert "tokens per step (bonus and recovered included)" in result.stderr


def test_a_turn_that_does_not_fit_is_forgotten(llm: LLM) -> None:
    limits = ["--max-len", "90"]
    result = paceline(*BASE, *limits, stdin=f"hi\n{'x' * 200}\n/reset\nhi\n")
    assert result.exit_code == 1
    assert result.stdout == (talk(llm, ["hi"])[0] + "\n") * 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("paceline: error: ")]
    assert len(errors) == 1
    assert "/reset forgets" in errors[0]


def test_an_answer_that_fails_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ToyBackend(max_seqs=1, nan_when=lambda visible: ALPHABET.index(ord("#")) in visible)
    monkeypatch.setattr("paceline.llm.open_backend", lambda *_, **__: broken)
    alone = ["chat", "--model", "toy", "--temperature", "0", "--max-tokens", "3", "--drafter", "none"]
    result = paceline(*alone, stdin="#\nhi\n")
    assert result.exit_code == 1
    assert "paceline: error: " in result.stderr
    expected = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=3))
    assert result.stdout == expected[0].outputs[0].text + "\n"


def test_options_that_cannot_be_end_it_at_once() -> None:
    assert paceline(*BASE, "--top-p", "2", stdin="hi\n").exit_code == 2
    result = paceline(*BASE, "--logit-bias", "9999=1", stdin="hi\nhi\n")
    assert result.exit_code == 2
    assert "9999" in error_line(result)
    binary = paceline(*BASE, stdin=b"\xff\n")
    assert binary.exit_code == 2
    assert "standard input is not UTF-8" in error_line(binary)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on() -> None:
    endless = ["chat", "--model", "toy", "--ignore-eos", "--max-tokens", "none"]
    with started(*endless, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            process.stdin.write(b"hi\n")
            process.stdin.flush()
            assert os.read(process.stdout.fileno(), 1)
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == b"paceline: note: stopped\n"
            os.read(process.stdout.fileno(), 1 << 16)  # what was written before it stopped
        process.stdin.write(b"/quit\n")
        process.stdin.close()
        assert process.wait(timeout=PATIENCE) == 0


def test_ctrl_c_while_a_pipe_is_waited_on_ends_it() -> None:
    with started(*BASE, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130


def test_on_a_terminal() -> None:
    with Terminal(*BASE, "--show-drafts") as terminal:
        terminal.wait_for("/quit leaves")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("\x1b[32m")
        terminal.wait_for("> ")
        terminal.interrupt_until("/quit or Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.seen


def test_a_terminal_that_sends_no_text_is_answered_with_a_line() -> None:
    with Terminal(*BASE, PYTHONUTF8="0", LC_ALL="C.UTF-8") as terminal:
        terminal.wait_for("> ")
        os.write(terminal.main, b"a\xffb\n")
        terminal.wait_for("paceline: error: this line is not UTF-8 text")
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.end() == 0
