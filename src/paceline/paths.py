"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ModelError

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """$PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline. Not created here.

    Raises ModelError where $PACELINE_CACHE names the home of nobody.
    """
    chosen = os.environ.get("PACELINE_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError as error:  # ~user of a user that is not there
            raise ModelError(f"PACELINE_CACHE = {chosen!r}: {error}") from error
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "paceline"
