"""How a command ends: exit status, and one line on stderr instead of a traceback.

    0    it worked
    1    it failed: a model, a backend, a request that ended with an error
    2    its arguments or its input cannot mean anything, or ask for what this version does not do
    130  Ctrl-C (128 + SIGINT, as shells count)
    141  the reader of its output went away (128 + SIGPIPE)

`--debug`, before or after the name of the command, adds the traceback; the status stays the same.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import InvalidInput, PacelineError, UnsupportedOption
from .hints import hint_for_option

OK = 0
FAILURE = 1
BAD_ARGUMENTS = 2
INTERRUPTED = 130
CLOSED_PIPE = 141

# Its children are all that the parser raises about arguments; Typer exports the child, not the parent.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_DEBUG = "paceline.debug"


class ReportedFailure(Exception):  # noqa: N818 - the error itself was shown to the user before
    """The command failed and has said so; only the exit status is left to set."""


def _set_debug(context: typer.Context, value: bool) -> None:
    context.meta[_DEBUG] = bool(value or context.meta.get(_DEBUG))


Debug = Annotated[
    bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.", callback=_set_debug)
]


class Commands(TyperGroup):
    """The group of all commands. It alone turns what they raise into an exit status."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Parse, run, and end the process."""
        prepare_streams()
        given = list(sys.argv[1:] if args is None else args)
        meta: dict[str, Any] = {}
        try:
            with self.make_context(prog_name or "paceline", given, **extra) as context:
                meta = context.meta
                self.invoke(context)
            sys.stdout.flush()
        except typer.Exit as wanted:
            _quit(wanted.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            _quit(INTERRUPTED)
        except BrokenPipeError:
            _drop_output()
            sys.exit(CLOSED_PIPE)
        except SystemExit as left:  # Rich leaves with 1 where its console meets a closed pipe
            sys.exit(CLOSED_PIPE if left.code == 1 else left.code)
        except ReportedFailure:
            _quit(FAILURE)
        except UsageError as error:
            say_error(_usage_message(error))
            _quit(BAD_ARGUMENTS)
        except Exception as error:
            if meta.get(_DEBUG):
                traceback.print_exc()
            say_error(describe(error))
            _quit(exit_status(error))
        _quit(OK)


def exit_status(error: Exception) -> int:
    """2 where the caller asked for something that cannot be, else 1."""
    return BAD_ARGUMENTS if isinstance(error, (InvalidInput, UnsupportedOption)) else FAILURE


def describe(error: Exception) -> str:
    """An error in one line. One that Paceline did not raise on purpose is said to be so."""
    if isinstance(error, PacelineError):
        return str(error)
    if isinstance(error, (OSError, MemoryError)):
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)"


def say_error(message: str) -> None:
    """`paceline: error: ...` on stderr, in one line whatever the message holds."""
    _say("error", message)


def say_note(message: str) -> None:
    """`paceline: note: ...` on stderr: something the user should know, though nothing failed."""
    _say("note", message)


@contextmanager
def warnings_as_notes(kind: type[Warning]) -> Iterator[None]:
    """Warnings of this kind that are given inside become notes, equal ones a single note."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kind)
        yield
    for message in dict.fromkeys(str(warning.message) for warning in caught):
        say_note(message)


def prepare_streams() -> None:
    """Streams that can always be used: open, and able to write any character.

    One that was closed by the caller (`>&-`) reads or writes nothing. One that is not UTF-8 writes \\u escapes
    for what its encoding lacks, instead of failing.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - kept open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not is_utf8(stream):
            stream.reconfigure(errors="backslashreplace")


def is_utf8(stream: Any) -> bool:
    """Whether the stream can carry every character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "").startswith("utf8")


def _say(kind: str, message: str) -> None:
    with suppress(BrokenPipeError):
        print(f"paceline: {kind}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    where = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{_usage_hint(error, context) or error.format_message()}{where}"


def _usage_hint(error: Any, context: Any) -> str | None:
    """A better message than the parser's, where it is known what was meant."""
    if context is None:
        return None
    offered = {option for p in context.command.params for option in (*p.opts, *p.secondary_opts)}
    if type(error).__name__ == "NoSuchOption":
        hint = hint_for_option(error.option_name, offered)
        return None if hint is None else f"No such option: {error.option_name}; {hint}"
    message = str(error.format_message())
    if message.startswith("Got unexpected extra argument"):
        if "--prompt" in offered:
            return f"{message}; a prompt is given with --prompt TEXT, or -p, in quotes"
        if "--system" in offered:
            return f"{message}; what is said to the model is typed, or piped in"
    return None


def _quit(status: int) -> NoReturn:
    """End the process. What is still unwritten is written here, where a closed pipe makes no noise."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_output()
        if status == OK:
            status = CLOSED_PIPE if isinstance(error, BrokenPipeError) else FAILURE
    sys.exit(status)


def _drop_output() -> None:
    """Point stdout at nothing, so that the interpreter's own last flush cannot fail."""
    with suppress(OSError, ValueError):  # ValueError: a stdout that is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
