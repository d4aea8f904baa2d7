"""`paceline chat`: a conversation in a terminal, or line by line through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InvalidInput, InvalidPrompt, PacelineError, UnsupportedOption
from ..params import SamplingParams
from ..types import StreamChunk
from .answer import cut_at, notes_on
from .constraints import ConstraintOptions
from .exits import Debug, ReportedFailure, describe, say_error, say_note
from .loading import Session, open_session
from .logprobs import print_logprobs
from .options import ModelOptions
from .prompts import checked, decode
from .report import stats_line
from .sampling import SamplingOptions
from .streaming import Message, TextWriter, run_request

COMMANDS = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer"
PROMPT = "> "


class AnswerStopped(Exception):  # noqa: N818 - not an error
    """The user pressed Ctrl-C while an answer was made."""


@dataclass
class Conversation:
    """What was said so far. A turn that failed is forgotten, so that the next one is not refused for it."""

    session: Session
    params: SamplingParams
    system: str | None
    writer: TextWriter
    stats: bool
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def reply(self, text: str) -> None:
        """Answer one turn on stdout; one that was stopped counts as far as it came."""
        said: list[str] = []
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        try:
            with ctrl_c_sets_a_flag() as pressed:

                def write(chunk: StreamChunk) -> None:
                    said.append(chunk.text)
                    self.writer.write(chunk)
                    if pressed() and chunk.output is None:
                        raise AnswerStopped

                answer = run_request(self.session, asked, self.params, write)
        except AnswerStopped:
            self.writer.end()
            say_note("stopped")
        else:
            self.writer.end()
            if answer.output.outputs[0].error is not None:
                raise answer.output.outputs[0].error
            print_logprobs(answer.output, self.params)
            only = answer.output.outputs[0]
            # Without a grammar too: the next turn goes on from what is there.
            notes = notes_on(answer.output, self.params)
            if only.finish_reason == "length" and not notes:
                notes = [cut_at(only, self.params)]
            for note in notes:
                say_note(note)
            if self.stats:
                Console(stderr=True, highlight=False).print(stats_line(answer), style="dim", soft_wrap=True)
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def chat(
    *,
    sampling: SamplingOptions,
    constraints: ConstraintOptions,
    models: ModelOptions,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", metavar="", help="Speed and acceptance of each answer, on stderr.")
    ] = False,
    show_drafts: Annotated[
        bool,
        typer.Option("--show-drafts", metavar="", help="Colour accepted, recovered and bonus tokens, on a terminal."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Talk with a model.

    Each line is a turn; the conversation so far is kept. /reset forgets it, /quit or Ctrl-D leaves. Ctrl-C
    stops the answer that is being made after its present step; pressed again before that, the program. Lines
    may be piped in.
    """
    params = sampling.params(**constraints.keywords(stdin_taken="the conversation"))
    if params.n > 1:
        raise UnsupportedOption(f"--n {params.n}: a conversation goes on from one answer; `generate` has several")
    with open_session(models) as session:
        writer = TextWriter(show_drafts=show_drafts)
        conversation = Conversation(session, params, system, writer, stats)
        # Refused here rather than at the first turn where the model has no chat template.
        session.llm.backend.tokenizer.apply_chat_template([*conversation.messages, {"role": "user", "content": "?"}])
        if sys.stdin.isatty():
            Console(stderr=True, highlight=False).print(f"{session.model}, drafter {session.drafter}. {COMMANDS}.")
        writer.legend()
        failed = converse(conversation)
    if failed and not sys.stdin.isatty():
        raise ReportedFailure


def converse(conversation: Conversation) -> bool:
    """Take turns until the input ends; whether any of them failed."""
    failed = False
    for line in read_turns():
        word = line.strip()
        if word in ("/quit", "/exit"):
            break
        if word == "/reset":
            conversation.reset()
            say_note("the conversation is forgotten")
        elif word.startswith("/") and " " not in word and word[1:].isalpha():
            say_note(f"no command {word}; {COMMANDS}")
        elif word:
            try:
                conversation.reply(checked(line, "this line"))
            except InvalidPrompt as error:
                failed = True
                say_error(f"{error} (/reset forgets the conversation)")
            except (InvalidInput, UnsupportedOption):
                raise  # the options are wrong, and would be at every turn
            except PacelineError as error:
                failed = True
                say_error(describe(error))
    return failed


def read_turns() -> Iterator[str]:
    """Lines of standard input, with a prompt and line editing on a terminal."""
    if not sys.stdin.isatty():
        for data in iter(sys.stdin.buffer.readline, b""):
            yield decode(data, "standard input")
        return
    with suppress(ImportError):  # absent on Windows, where input() edits lines by itself
        import readline  # noqa: F401
    while True:
        try:
            yield _ask()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            say_note("/quit or Ctrl-D leaves")


def _ask() -> str:
    """One line. input() puts its prompt on stdout, which holds nothing but answers where it is redirected."""
    if sys.stdout.isatty():
        return input(PROMPT)
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return input()


@contextmanager
def ctrl_c_sets_a_flag() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function true, so that a step is never torn apart.

    The second one is a KeyboardInterrupt as everywhere else.
    """
    pressed = False

    def first(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, first)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
