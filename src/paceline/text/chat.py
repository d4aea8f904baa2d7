"""Render a model's own chat template, which is a program from a stranger's file, in a sandbox.

The dialect is the one that published models expect (transformers' `apply_chat_template`): Jinja with `trim_blocks`,
`lstrip_blocks` and loop controls; `raise_exception`, `strftime_now` and a `tojson` that leaves characters as they
are; `{% generation %}` blocks are read and have no effect here.

What a template may not do ends in a typed error, never in a hang: reach Python objects (jinja2's
ImmutableSandboxedEnvironment), run more than MAX_STEPS loop turns and calls, or build more than MAX_TEXT
characters on the way. Filters and string methods that blow text up without a template needing them are not offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidInput, UnsupportedOption

__all__ = ["MAX_STEPS", "MAX_TEXT", "render"]

MAX_STEPS = 200_000
MAX_TEXT = 2**27
MAX_TEMPLATE = 2**20
MAX_INDENT = 1_000
MAX_BITS = 4_096

NOT_OFFERED_FILTERS = (
    "batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
OTHER_TEMPLATES: tuple[type[nodes.Node], ...] = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
NOT_OFFERED_METHODS = frozenset(("center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"))


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

    Raises InvalidInput for malformed messages and for those the template refuses (its own message is quoted);
    UnsupportedOption for a template that cannot be read, breaks the sandbox or does not end, and for content
    that is not text.
    """
    variables = {
        **(extra or {}),
        "messages": _checked(messages),
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    program = _compiled(template)
    token = _budget.set(_Budget())
    try:
        return program.render(variables)
    except _RefusedError as error:
        raise InvalidInput(f"the model's chat template refuses the conversation: {error}") from None
    except (_TooMuchError, SecurityError) as error:
        raise UnsupportedOption(f"the model's chat template is not safe to run: {error}") from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise UnsupportedOption(f"the model's chat template does not end: {type(error).__name__} {error}") from None
    except Exception as error:  # a stranger's program: whatever else it does wrong, on these messages
        raise InvalidInput(
            f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
        ) from error
    finally:
        _budget.reset(token)


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


# --- limits -----------------------------------------------------------------------------------------


class _RefusedError(TemplateError):
    """The template called raise_exception."""


class _TooMuchError(TemplateError):
    """The template went over a limit."""


class _Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.steps = 0
        self.text = 0

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MAX_STEPS:
            raise _TooMuchError(f"it needs more than {MAX_STEPS} loop turns and calls")

    def write(self, length: int) -> None:
        self.text += length
        if self.text > MAX_TEXT:
            raise _TooMuchError(f"it builds more than {MAX_TEXT} characters")


_budget: ContextVar[_Budget] = ContextVar("paceline_chat_budget")


def _counted(iterable: Any) -> Any:
    """What a loop runs over, its turns charged: at once where the length is known, else one by one."""
    if isinstance(iterable, Sized):
        _budget.get().step(len(iterable))
        return iterable
    return _one_by_one(iterable)


def _one_by_one(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in iterable:
        budget.step()
        yield item


def _counted_range(*bounds: int) -> range:
    numbers = range(*bounds)
    # len() overflows on ranges beyond 2**63, which are too long as well.
    if (numbers.stop - numbers.start) // numbers.step > MAX_STEPS:
        raise _TooMuchError(f"it wants a range of {numbers}")
    _budget.get().step(len(numbers))
    return numbers


def _concatenated(parts: Iterable[str]) -> str:
    budget = _budget.get()
    kept = []
    for part in parts:
        budget.write(len(part))
        kept.append(part)
    return "".join(kept)


def _joined(*parts: Any) -> str:
    return _concatenated(_charged_text(part) for part in parts)


def _charged_text(value: Any) -> str:
    """str(value) once it is known to stay in bounds."""
    if isinstance(value, str):
        return value
    _budget.get().write(_weight(value))
    return str(value)


def _weight(value: Any) -> int:
    """About how many characters `value` prints as. Lists may share their items, so a few can print as billions."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        _budget.get().step(len(value))
        return sum(map(_weight, value)) + 4 * len(value)
    return 0


def _sized(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _check_format(pattern: object) -> None:
    """Refuse a field width that would make one short value huge."""
    if isinstance(pattern, str) and re.search(r"\d{5,}", pattern):
        raise _TooMuchError(f"it formats with {_short(pattern)}")


# --- the dialect ------------------------------------------------------------------------------------


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with every loop, call and growing text charged to the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Not optimized: folding constants would run a template's expressions while it is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_charged_text,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.concat: Any = _concatenated
        self.counted = _counted
        self.joined = _joined
        for name in NOT_OFFERED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        for name, guard in FILTER_GUARDS.items():
            self.filters[name] = _guarded(self.filters[name], guard)
        self.globals = {
            "range": _counted_range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes)) and attr in NOT_OFFERED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget.get()
        budget.step()
        if isinstance(__obj, LoopContext):  # a recursive loop runs over its argument
            budget.step(sum(map(_sized, args)))
        # jinja2 wraps str.format; the method itself is one step behind.
        method = getattr(__obj, "__wrapped__", __obj)
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            METHOD_GUARDS.get(method.__name__, _no_guard)(subject, *args, *kwargs.values())  # type: ignore[no-untyped-call]
        return ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_product(operator, left, right)
        elif operator == "+":
            _budget.get().write(_sized(left) + _sized(right))
        elif operator == "%":
            _guard_format(left, right)
        elif operator == "*":
            times = right if isinstance(right, int) else left
            _budget.get().write((_sized(left) + _sized(right)) * max(0, int(times)))
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise _RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    _check_format(pattern)
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML, which no model was trained on.
    if isinstance(indent, int) and indent > MAX_INDENT:
        raise _TooMuchError(f"it indents by {indent}")
    _budget.get().write(_weight(value))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _budget.get().write(len(text))
    return text


def _check_product(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    if operator in ("*", "**") and bits > MAX_BITS:
        raise _TooMuchError(f"it computes {_short(left)} {operator} {_short(right)}")


# Each guard sees the subject and the arguments, and charges what the result may come to.


def _no_guard(*_: Any) -> None:
    """For what cannot make text longer."""


def _guard_text(value: Any = "", *_: Any) -> None:
    _charged_text(value)


def _guard_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    found = _charged_text(text).count(str(old))
    _budget.get().write(len(str(text)) + found * _weight(new))


def _guard_join(items: Any, separator: Any = "", *_: Any) -> None:
    _budget.get().write(_weight(items) + _sized(items) * _weight(separator))


def _guard_indent(text: Any, width: Any = 4, *_: Any) -> None:
    wide = width if isinstance(width, int) else _weight(width)
    if wide > MAX_INDENT:
        raise _TooMuchError(f"it indents by {_short(width)}")
    _budget.get().write(_weight(text) + (str(text).count("\n") + 1) * wide)


def _guard_format(pattern: Any, *values: Any) -> None:
    _check_format(pattern)
    _budget.get().write(_sized(pattern) * (1 + sum(map(_weight, values))))


FILTER_GUARDS: dict[str, Callable[..., None]] = {
    "replace": _guard_replace,
    "join": _guard_join,
    "indent": _guard_indent,
    "format": _guard_format,
    "string": _guard_text,
}
METHOD_GUARDS: dict[str, Callable[..., None]] = {
    "replace": _guard_replace,
    "join": lambda separator, items=(), *_: _guard_join(items, separator),
    "format": _guard_format,
}


def _guarded(function: Callable[..., Any], guard: Callable[..., None]) -> Callable[..., Any]:
    takes_context = getattr(function, "jinja_pass_arg", None) is not None

    def guarded(*args: Any, **kwargs: Any) -> Any:
        guard(*(args[1:] if takes_context else args), *kwargs.values())
        return function(*args, **kwargs)

    if takes_context:
        guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return guarded


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    """The program of a template. Raises UnsupportedOption where it cannot be read."""
    if len(source) > MAX_TEMPLATE:
        raise UnsupportedOption(f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE}")
    sandbox = _Sandbox()
    try:
        tree = sandbox.parse(source)
        if any(tree.find(kind) for kind in OTHER_TEMPLATES):
            raise TemplateError("it wants to read other templates")
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _call(loop, "counted", [cast(nodes.Expr, loop.iter)])
        for pair in list(tree.find_all(nodes.Concat)):
            _replace(tree, pair, _call(pair, "joined", pair.nodes))
        return Template.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f" at line {line}" if line else ""
        raise UnsupportedOption(f"the model's chat template cannot be read{where}: {error}") from None


def _call(at: nodes.Node, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    """A call of the sandbox's own attribute, which no assignment in a template can shadow."""
    function = nodes.EnvironmentAttribute(name)
    call = nodes.Call(function, arguments, [], None, None)
    call.set_lineno(at.lineno, override=True)
    return call


def _replace(tree: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    for node in [tree, *tree.find_all(nodes.Node)]:
        for field, value in node.iter_fields():
            if value is old:
                setattr(node, field, new)
            elif isinstance(value, list):
                value[:] = [new if item is old else item for item in value]
