"""Drafters by name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Literal, NamedTuple

from ..errors import InvalidParams
from ..types import Drafter
from .lookup import LookupDrafter
from .none import NoDrafter

__all__ = ["DEFAULT_DRAFT_LENGTH", "DrafterSpec", "build_drafter", "parse_drafter"]

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


def build_drafter(spec: str) -> Drafter:
    """A drafter that needs no model. For "model:NAME" open a backend and build a ModelDrafter on it."""
    kind, argument = parse_drafter(spec)
    if kind == "model":
        raise InvalidParams(
            f"drafter = {spec!r} needs a loaded model; open {argument!r} and pass it to ModelDrafter"
        )
    return NoDrafter() if kind == "none" else LookupDrafter()
