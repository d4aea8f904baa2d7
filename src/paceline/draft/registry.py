"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal, NamedTuple

from ..errors import InvalidParams
from ..types import Backend, Drafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .none import NoDrafter

__all__ = ["DEFAULT_DRAFT_LENGTH", "DrafterSpec", "open_drafter", "parse_drafter"]

DEFAULT_DRAFT_LENGTH = 4
"""Drafts per step where neither the caller nor the request says."""

NAMES = ("auto", "none", "lookup", "model:NAME")


class DrafterSpec(NamedTuple):
    """A drafter's name, taken apart. argument: the model's name for "model", else ""."""

    kind: Literal["none", "lookup", "model"]
    argument: str


def parse_drafter(spec: str) -> DrafterSpec:
    """Take "auto", "none", "lookup" or "model:NAME" apart; "auto" means lookup. Loads nothing.

    Raises InvalidParams that repeats `spec`, lists what exists and names the closest of it.
    """
    allowed = f"allowed: {', '.join(NAMES)}"
    if not isinstance(spec, str):
        raise InvalidParams(f"drafter = {spec!r}; {allowed}")
    kind, colon, argument = spec.partition(":")
    if kind == "model":
        if not argument:
            raise InvalidParams(f"drafter = {spec!r} names no model; write model:NAME, as in model:smollm2")
        return DrafterSpec("model", argument)
    if not colon and kind in ("auto", "lookup"):
        return DrafterSpec("lookup", "")
    if not colon and kind == "none":
        return DrafterSpec("none", "")
    close = get_close_matches(kind, [name.partition(":")[0] for name in NAMES], n=1)
    hint = ""
    if colon and close == [kind]:
        hint = f"; {kind} takes nothing behind a colon"
    elif close:
        hint = f"; did you mean {'model:NAME' if close[0] == 'model' else close[0]}?"
    raise InvalidParams(f"drafter = {spec!r}; {allowed}{hint}")


def open_drafter(spec: str, target: Backend, open_backend: Callable[[str], Backend]) -> Drafter:
    """The drafter that `spec` names, for `target`. open_backend opens the model of "model:NAME" by its name.

    Raises what parse_drafter, open_backend and ModelDrafter raise; a backend that was opened is closed again.
    """
    kind, model = parse_drafter(spec)
    if kind == "none":
        return NoDrafter()
    if kind == "lookup":
        return LookupDrafter()
    backend = open_backend(model)
    try:
        return ModelDrafter(backend, spec, target)
    except BaseException:
        backend.close()
        raise
