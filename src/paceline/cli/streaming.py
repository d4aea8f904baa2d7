"""The answer while it is made: text on stdout as it is committed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text

from ..errors import InvariantError, UnsupportedOption
from ..params import SamplingParams
from ..types import RequestOutput, StreamChunk
from .exits import say_note, warnings_as_notes
from .loading import Session

# Told apart without colour too: plain, bold, underlined.
KIND_STYLES: Mapping[str, Style] = {
    "accepted": Style(color="green"),
    "recovered": Style(color="red", bold=True),
    "bonus": Style(color="cyan", underline=True),
}
KIND_MEANINGS: Mapping[str, str] = {
    "accepted": "draft kept",
    "recovered": "after a rejection",
    "bonus": "none rejected",
}

# A model may write escape sequences; a terminal obeys them. Shown as `^[` and the like, not sent.
_VISIBLE = {code: f"^{chr(code ^ 0x40)}" for code in [*range(0x20), 0x7F] if chr(code) not in "\n\t"}
_VISIBLE |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. first_text_seconds: until its first characters; None where it has none."""

    output: RequestOutput
    first_text_seconds: float | None
    total_seconds: float


class TextWriter:
    """Writes chunks to stdout: exact text into a file or a pipe, printable and coloured on a terminal."""

    def __init__(self, *, show_drafts: bool = False) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._terminal = self._console.is_terminal
        self._colours = show_drafts and self._terminal
        self._last = ""
        if show_drafts and not self._terminal:
            say_note("--show-drafts needs a terminal; the text is plain")

    def legend(self) -> None:
        """What the colours mean; nothing where there are none."""
        if self._colours:
            entries = [Text(f"{kind}: {KIND_MEANINGS[kind]}", style) for kind, style in KIND_STYLES.items()]
            self._console.print(Text(" · " if self._utf8() else " | ").join(entries))

    def write(self, chunk: StreamChunk) -> None:
        """One step's text."""
        if not chunk.text:
            return
        self._last = chunk.text[-1]
        if self._colours:
            for text, kind in chunk.pieces:
                self._console.out(text.translate(_VISIBLE), style=KIND_STYLES[kind], end="")
        else:
            sys.stdout.write(chunk.text.translate(_VISIBLE) if self._terminal else chunk.text)
        sys.stdout.flush()

    def end(self) -> None:
        """Leave the cursor at the start of a line; called after the last chunk or instead of it."""
        if self._last not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""

    def _utf8(self) -> bool:
        return self._console.encoding.lower().startswith("utf")


class InTurn:
    """Writes the samples of a request one after another: the first that is not over as it is made, the others after it.

    Headings go to stderr, so that stdout holds nothing but the texts.
    """

    def __init__(self, writer: TextWriter, samples: int) -> None:
        self._writer = writer
        self._held: list[deque[StreamChunk]] = [deque() for _ in range(samples)]
        self._turn = 0
        self._begun = samples == 1  # a single one needs no heading

    def write(self, chunk: StreamChunk) -> None:
        """One step's text of one sample."""
        self._held[chunk.index].append(chunk)
        while self._turn < len(self._held) and self._held[self._turn]:
            if not self._begun:
                self._begun = True
                print(f"--- sample {self._turn} of {len(self._held)}", file=sys.stderr, flush=True)
            now = self._held[self._turn].popleft()
            self._writer.write(now)
            if now.finish_reason is not None:
                self._writer.end()
                self._turn += 1
                self._begun = False


def run_request(
    session: Session,
    prompt: str | Sequence[Message],
    params: SamplingParams,
    write: Callable[[StreamChunk], None],
) -> Answer:
    """Stream one prompt or conversation into `write`. What `write` raises cancels the request."""
    start = perf_counter()
    first_text: float | None = None
    with warnings_as_notes(UserWarning):  # what a lenient grammar dropped
        stream = session.llm.stream(prompt, params)
    with stream:
        for chunk in stream:
            if first_text is None and chunk.text:
                first_text = perf_counter() - start
            write(chunk)
            if chunk.output is not None:
                return Answer(chunk.output, first_text, perf_counter() - start)
    raise InvariantError("the stream ended without an output")


def as_request(session: Session, prompt: str, chat: bool | None) -> str | list[Message]:
    """The prompt as a conversation of one turn, or as it stands.

    chat: True for the model's chat template (UnsupportedOption where it has none), False for raw text,
    None for the template where there is one.
    """
    conversation: list[Message] = [{"role": "user", "content": prompt}]
    if chat is None:
        try:
            session.llm.backend.tokenizer.apply_chat_template(conversation)
        except UnsupportedOption:
            say_note(f"{session.model} has no chat template; the prompt is continued as it stands (--raw)")
            return prompt
    return prompt if chat is False else conversation
