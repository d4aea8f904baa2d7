"""Where texts come from: --prompt, files, or whatever is piped in."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import InvalidInput, InvalidPrompt


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text to start from, exactly, but for one newline at the end of a file or a pipe.

    prompt_file may be `-`, standard input. Raises InvalidPrompt where there is none, more than one, nothing
    in it, or no UTF-8 text in it.
    """
    if prompt is not None and prompt_file is not None:
        raise InvalidPrompt("--prompt and --prompt-file were both given; give one of them")
    if prompt is not None:
        text, origin = checked(prompt, "--prompt"), "--prompt"
    elif prompt_file is None or is_on_stdin(prompt, prompt_file):
        if prompt_file is None and sys.stdin.isatty():
            raise InvalidPrompt("no prompt; give --prompt TEXT or --prompt-file FILE, or pipe a text in")
        origin = "standard input"
        text = decode(sys.stdin.buffer.read(), origin)
    else:
        origin = f"--prompt-file {str(prompt_file)!r}"
        text = decode(read_file(prompt_file, "--prompt-file"), origin)
    if not text:
        raise InvalidPrompt(f"{origin} is empty; a prompt needs at least one character")
    return text


def is_on_stdin(prompt: str | None, prompt_file: Path | None) -> bool:
    """Whether read_prompt would read standard input."""
    return prompt is None and (prompt_file is None or str(prompt_file) == "-")


def decode(data: bytes, origin: str, error: type[InvalidInput] = InvalidPrompt) -> str:
    """UTF-8 bytes as text, without a byte order mark and without one newline at the end.

    Editors and `echo` end what they write with a newline that nobody meant to be part of it.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        raise error(
            f"{origin} is not UTF-8 text: byte 0x{data[bad.start]:02x} at offset {bad.start}; convert it first"
        ) from None
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def checked(text: str, origin: str, error: type[InvalidInput] = InvalidPrompt) -> str:
    """Arguments and terminals hand over bytes that are not UTF-8 as lone surrogates, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as bad:
        raise error(f"{origin} is not UTF-8 text at character {bad.start}; convert it first") from None
    return text


def read_file(path: Path, option: str, error: type[InvalidInput] = InvalidPrompt) -> bytes:
    """The file that `option` names. Raises `error` where there is none, or none that can be read."""
    try:
        return path.expanduser().read_bytes()
    except OSError as bad:
        raise error(f"{option} {str(path)!r} cannot be read: {bad.strerror or bad}") from None
