"""Running `paceline` as its users do: in this process, in another one, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner, Result

from paceline.cli.app import app

COMMAND = [sys.executable, "-c", "from paceline.cli import main; main()"]
PATIENCE = 60.0  # seconds; nothing here takes that long on a machine that is not stuck


def paceline(*arguments: str, stdin: str | bytes = b"", **environment: str) -> Result:
    """Run a command in this process, with what it prints in .stdout and .stderr."""
    return CliRunner(env=environment).invoke(app, list(arguments), input=stdin)


def toy(*arguments: str) -> dict[str, Any]:
    """The JSON object of `generate` on the toy model with a fixed seed; anything else on stdout fails."""
    result = paceline("generate", "--model", "toy", "--format", "json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def error_line(result: Result) -> str:
    """The one line on stderr, without its prefix."""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("paceline: error: ")
    return lines[0].removeprefix("paceline: error: ")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what would change colours or encodings."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "PYTHONIOENCODING", "PYTHONUTF8")
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, "TERM": "xterm-256color", **more}


def hear_interrupts() -> None:
    """A shell's background job ignores Ctrl-C and hands that down; these tests send it on purpose."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*arguments: str, stdin: Any = subprocess.DEVNULL, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, with pipes; killed if it is still there at the end."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**more),
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


class Terminal:
    """A command on a pseudo-terminal: what it wrote so far, and how it ended.

    answers_only: its stderr goes elsewhere, and with it bars and notes.
    """

    def __init__(self, *arguments: str, answers_only: bool = False, **more: str) -> None:
        self.main, side = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=side,
            stdout=side,
            stderr=subprocess.DEVNULL if answers_only else side,
            env=environment(**more),
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )
        os.close(side)
        self.seen = ""
        self._looked_at = 0

    def type(self, text: str) -> None:
        """Keys of the user, `\\n` for Enter."""
        os.write(self.main, text.encode())

    def interrupt(self) -> None:
        """What Ctrl-C does to the program in the foreground."""
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, again where it was lost: input() does not see one that comes just before it starts to wait."""
        for _ in range(20):
            self.interrupt()
            self._read(lambda: text in self.seen[self._looked_at :], seconds=1.0)
            if text in self.seen[self._looked_at :]:
                break
        self.wait_for(text)

    def wait_for(self, text: str) -> None:
        """Read until `text` was written behind what the last call waited for."""
        self._read(lambda: text in self.seen[self._looked_at :])
        found = self.seen.find(text, self._looked_at)
        assert found >= 0, f"{text!r} never came; the terminal shows:\n{self.seen[self._looked_at :]}"
        self._looked_at = found + len(text)

    def wait_for_characters(self, number: int) -> None:
        """Read until so many were written in all."""
        self._read(lambda: len(self.seen) >= number)
        assert len(self.seen) >= number

    def end(self) -> int:
        """Read the rest; exit status."""
        self._read(lambda: False)
        return self.process.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.main)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, done: Callable[[], bool], seconds: float = PATIENCE) -> None:
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            if not select.select([self.main], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.main, 4096)
            except OSError:  # Linux says so where the other side is closed
                return
            if not data:
                return
            self.seen += data.decode("utf-8", "replace")
