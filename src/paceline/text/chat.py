"""Render a model's own chat template, which is a program from the model's file, in jinja2's sandbox.

The dialect is the one that published models expect (transformers' `apply_chat_template`): Jinja with `trim_blocks`,
`lstrip_blocks` and loop controls; `raise_exception`, `strftime_now` and a `tojson` that leaves characters as they
are; `{% generation %}` blocks are read and have no effect here.

The sandbox keeps a template from Python's objects, from files, imports and other templates, and from changing
the messages. It does not bound the time or the memory of a template: that is part of a model file that one chose to
run, like its weights. Only `range` is bounded (by jinja2), and the size of the template's source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import DictLoader, Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateNotFound, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidInput, UnsupportedOption

__all__ = ["render"]

MAX_SOURCE = 2**18


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str = "",
    eos: str = "",
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    messages: mappings with a `role` and a `content`: a string, or a list of {"type": "text", "text": ...} parts, which
    are joined; None only beside `tool_calls`. Other keys reach the template as they are. bos, eos: the
    texts of those tokens. add_generation_prompt: end with the opened turn of the assistant. extra: further
    variables of the template, such as `tools` or `enable_thinking`.

    Raises InvalidInput for malformed messages, and for those that the template refuses (its own message is quoted)
    or fails on; UnsupportedOption for a template that cannot be read, breaks the sandbox or runs out of stack, memory
    or range, and for content that is not text.
    """
    variables = {
        **(extra or {}),
        "messages": _checked(messages),
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    program = _compiled(template)
    try:
        return program.render(variables)
    except _RefusedError as error:
        raise InvalidInput(f"the model's chat template refuses the conversation: {error}") from None
    except (SecurityError, TemplateNotFound) as error:
        raise UnsupportedOption(f"the model's chat template reaches outside its sandbox: {error}") from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise UnsupportedOption(f"the model's chat template runs away: {type(error).__name__} {error}") from None
    except Exception as error:  # whatever else a program can do wrong, on these messages
        what = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"the model's chat template fails on these messages: {what}") from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidInput(f"messages = {_short(messages)}; allowed: a non-empty list of role and content")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidInput(f"messages[{i}] = {_short(message)}; allowed: a mapping with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidInput(f"messages[{i}]['role'] = {_short(role)}; allowed: a non-empty string")
        checked.append({**message, "content": _content(i, message)})
    return checked


def _content(i: int, message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                raise UnsupportedOption(f"messages[{i}]: content of type {kind!r} is not supported, only text")
            if not isinstance(part.get("text"), str):
                raise InvalidInput(f"messages[{i}]: a text part without text: {_short(part)}")
            texts.append(part["text"])
        return "".join(texts)
    raise InvalidInput(f"messages[{i}]['content'] = {_short(content)}; allowed: a string or text parts")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _RefusedError(TemplateError):
    """The template called raise_exception."""


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes <, > and & for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    """The program of a template. Raises UnsupportedOption where it cannot be read."""
    if len(source) > MAX_SOURCE:
        raise UnsupportedOption(f"the model's chat template has {len(source)} characters; at most {MAX_SOURCE}")
    dialect: list[str | type[Extension]] = ["jinja2.ext.loopcontrols", _Generation]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=dialect)
    sandbox.loader = DictLoader({})  # include and import find nothing
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return sandbox.from_string(source)
    except Exception as error:  # also what the parser's recursion or a folded constant may raise
        where = f" at line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UnsupportedOption(f"the model's chat template cannot be read{where}: {error}") from None
