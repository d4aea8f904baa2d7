"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal, NamedTuple

from ..errors import InvalidParams
from ..types import FORCED, Backend, Drafter
from .auto import AutoDrafter
from .forced import ForcedDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .none import NoDrafter

__all__ = ["DEFAULT_DRAFT_LENGTH", "DrafterSpec", "open_drafter", "parse_drafter"]

DEFAULT_DRAFT_LENGTH = 4
"""Drafts per step where neither the caller nor the request says."""

AUTO = "forced+lookup"
# What the same things are called elsewhere.
OTHER_NAMES = {
    "lookup": ("ngram", "n-gram", "ngrams", "prompt_lookup", "prompt-lookup", "promptlookup", "pld"),
    "model:NAME": ("draft", "draft_model", "draft-model", "assistant", "assistant_model"),
    "forced": ("grammar", "jump", "jump_forward"),
    "none": ("off", "no", "false", "disabled"),
}
NAMES = ("auto", "auto:NAME", "none", "lookup", "model:NAME", "forced", "forced+lookup", "forced+model:NAME")


class DrafterSpec(NamedTuple):
    """A drafter's name, taken apart.

    kind: "auto" is lookup or the model, whichever promises more. argument: the model's name, where there is one.
    forced: whether what a grammar forces is drafted first.
    """

    kind: Literal["none", "lookup", "model", "auto"]
    argument: str = ""
    forced: bool = False


def parse_drafter(spec: str) -> DrafterSpec:
    """Take one of NAMES apart. Loads nothing.

    "auto" means forced+lookup, "auto:NAME" that or forced+model:NAME, for each request in each step.

    Raises InvalidParams that repeats `spec`, lists what exists and names the closest of it.
    """
    allowed = f"allowed: {', '.join(NAMES)}"
    if not isinstance(spec, str):
        raise InvalidParams(f"drafter = {spec!r}; {allowed}")
    name = AUTO if spec == "auto" else spec
    if name == FORCED:
        return DrafterSpec("none", forced=True)
    inner = name.removeprefix(f"{FORCED}+")
    forced = inner != name
    kind, colon, argument = inner.partition(":")
    if (kind == "model" or spec.startswith("auto:")) and not argument:
        example = spec.partition(":")[0]
        raise InvalidParams(f"drafter = {spec!r} names no model; write {example}:NAME, as in {example}:smollm2")
    if spec.startswith("auto:"):
        return DrafterSpec("auto", argument, forced=True)
    if kind == "model":
        return DrafterSpec("model", argument, forced)
    if kind == "lookup" and not colon:
        return DrafterSpec("lookup", forced=forced)
    if kind == "none" and not colon and not forced:
        return DrafterSpec("none")
    raise InvalidParams(f"drafter = {spec!r}; {allowed}{_hint(spec)}")


def _hint(spec: str) -> str:
    """What was meant, if that can be guessed."""
    head, colon, _ = spec.partition(":")
    turned = spec.removesuffix(f"+{FORCED}")
    if turned != spec and f"{FORCED}+{turned.partition(':')[0]}" in [name.partition(":")[0] for name in NAMES]:
        return f"; did you mean {FORCED}+{turned}? What is forced comes first"
    meant = next((name for name, others in OTHER_NAMES.items() if head.lower() in others), None)
    if meant is not None:
        return f"; did you mean {meant}?"
    close = get_close_matches(head, [name.partition(":")[0] for name in NAMES], n=1)
    if colon and close == [head]:
        return f"; {head} takes nothing behind a colon"
    if close:
        return f"; did you mean {next(name for name in NAMES if name.partition(':')[0] == close[0])}?"
    return ""


def open_drafter(spec: str, target: Backend, open_backend: Callable[[str], Backend]) -> Drafter:
    """The drafter that `spec` names, for `target`. open_backend opens the model of "model:NAME" by its name.

    Raises what parse_drafter, open_backend and ModelDrafter raise; a backend that was opened is closed again.
    """
    kind, model, forced = parse_drafter(spec)
    inner = _open(kind, model, target, open_backend)
    if not forced:
        return inner
    if not model:
        return ForcedDrafter(inner)
    # What is forced is free, also where the model does not pay.
    cheap = ForcedDrafter(LookupDrafter()) if kind == "auto" else ForcedDrafter()
    return AutoDrafter(cheap, ForcedDrafter(inner), spec)


def _open(kind: str, model: str, target: Backend, open_backend: Callable[[str], Backend]) -> Drafter:
    if kind == "none":
        return NoDrafter()
    if kind == "lookup":
        return LookupDrafter()
    backend = open_backend(model)
    try:
        return ModelDrafter(backend, f"model:{model}", target)
    except BaseException:
        backend.close()
        raise
