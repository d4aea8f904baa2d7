"""The command as a process: on a terminal, in a pipe that closes, interrupted, in a narrow encoding."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from paceline.backend.toy import ALPHABET

from .shell import COMMAND, PATIENCE, Terminal, environment, started, toy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals and signals are POSIX")

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
ENDLESS = ["generate", "--model", "toy", "--prompt", "hello", "--ignore-eos", "--max-tokens", "none"]
SHORT = ["generate", "--model", "toy", "--prompt", "hello", "--seed", "3", "--max-tokens", "12"]


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(**more),
        timeout=PATIENCE,
        check=False,
    )


# --- on a terminal ----------------------------------------------------------------------------------


def test_text_streams_as_it_is_committed() -> None:
    with Terminal(*ENDLESS, answers_only=True) as terminal:
        terminal.wait_for_characters(20)
        assert terminal.process.poll() is None, "it had ended before anything was to be seen"
        terminal.interrupt()
        assert terminal.end() == 130
        assert "Traceback" not in terminal.seen


def test_drafts_have_colours_and_a_legend() -> None:
    with Terminal(
        *SHORT, "--show-drafts", "--drafter", "model:toy", "--draft-length", "2", answers_only=True
    ) as terminal:
        assert terminal.end() == 0
    legend, text = terminal.seen.split("\n", 1)
    assert [word in legend for word in ("accepted", "recovered", "bonus")] == [True] * 3
    assert "\x1b[32m" in text  # accepted
    assert "\x1b[4;36m" in text  # bonus
    assert ESCAPE.sub("", text).rstrip("\r\n") == toy(*SHORT[1:], "--drafter", "model:toy")["text"]


def test_without_colour_the_kinds_still_differ() -> None:
    arguments = ("--show-drafts", "--drafter", "model:toy:5", "--draft-length", "2", "--verification", "rejection")
    with Terminal(*SHORT, *arguments, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
    assert "\x1b[4m" in terminal.seen  # bonus underlined
    assert "\x1b[1m" in terminal.seen  # recovered bold
    assert not re.search(r"\x1b\[(\d+;)*3\d", terminal.seen)


def test_without_drafts_shown_there_is_no_escape_sequence() -> None:
    with Terminal(*SHORT, answers_only=True) as terminal:
        assert terminal.end() == 0
    assert terminal.seen.rstrip("\r\n") == toy(*SHORT[1:])["text"]


def test_a_model_cannot_send_escape_sequences_to_the_terminal() -> None:
    escape = ALPHABET.index(0x1B)
    bias = ["--logit-bias", f"{escape}=100", "--max-tokens", "3"]
    with Terminal("generate", "--model", "toy", "--prompt", "x", *bias, answers_only=True) as terminal:
        assert terminal.end() == 0
    assert terminal.seen.strip() == "^[^[^["
    assert run("generate", "--model", "toy", "--prompt", "x", *bias).stdout == b"\x1b\x1b\x1b\n"


def test_a_terminal_is_not_waited_on_for_a_prompt() -> None:
    with Terminal("generate", "--model", "toy") as terminal:
        assert terminal.end() == 2
    assert "paceline: error: no prompt; give --prompt" in terminal.seen


def test_loading_has_a_bar_that_leaves_nothing_behind() -> None:
    with Terminal(*SHORT) as terminal:
        assert terminal.end() == 0
    assert "loading toy" in terminal.seen
    cleared = terminal.seen.rsplit("\x1b[2K", 1)[1]  # the last time the bar's line was erased
    assert ESCAPE.sub("", cleared).strip() == toy(*SHORT[1:])["text"]


# --- in a pipe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [ENDLESS, ["--help"]], ids=["text", "table"])
def test_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    with started(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if arguments is ENDLESS:
            assert os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=PATIENCE) == 141


@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [(">&-", 0, ""), ("<&-", 2, "standard input is empty"), (">/dev/full", 1, "No space left")],
    ids=["stdout closed", "stdin closed", "disk full"],
)
def test_odd_redirections(redirection: str, status: int, said: str) -> None:
    arguments = ["rule", "--target", "1", "--draft", "1"] if ">" in redirection else ["generate", "--model", "toy"]
    line = f"{shlex.join([*COMMAND, *arguments])} {redirection}"
    result = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == status
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == (1 if said else 0)


def test_ctrl_c_is_quiet() -> None:
    with started(*ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stderr.read() == b""


def test_a_narrow_encoding_loses_nothing_and_does_not_crash() -> None:
    half = ALPHABET.index(0xC3)  # half a character: it becomes U+FFFD
    bias = ["--logit-bias", f"{half}=100", "--max-tokens", "2"]
    command = ["generate", "--model", "toy", "--prompt", "x", *bias]
    text = run(*command, PYTHONIOENCODING="ascii")
    assert (text.returncode, text.stdout, text.stderr) == (0, b"\\ufffd\\ufffd\n", b"")
    narrow = run(*command, "--format", "json", PYTHONIOENCODING="latin-1").stdout
    assert json.loads(narrow)["text"] == "\ufffd\ufffd"
    assert narrow.isascii()


def test_help_does_not_load_the_numerics() -> None:
    code = (
        "import sys; from paceline.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('llama_cpp', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert out.stdout.splitlines()[-1] == "[]"
