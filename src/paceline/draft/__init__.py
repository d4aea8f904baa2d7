"""Drafters: whatever guesses the next tokens."""

from .auto import AutoDrafter
from .forced import ForcedDrafter
from .guarded import GuardedDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .none import NoDrafter
from .registry import DEFAULT_DRAFT_LENGTH, DrafterSpec, open_drafter, parse_drafter
from .vocabulary import check_same_vocabulary

__all__ = [
    "DEFAULT_DRAFT_LENGTH",
    "AutoDrafter",
    "DrafterSpec",
    "ForcedDrafter",
    "GuardedDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "NoDrafter",
    "check_same_vocabulary",
    "open_drafter",
    "parse_drafter",
]
