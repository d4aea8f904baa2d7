"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ModelError

__all__ = ["cache_dir", "file_fingerprint"]


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


def file_fingerprint(path: Path) -> str:
    """What tells this file, or this folder's files, from others and from what it was before; nothing is read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return f"{path}: " + ", ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
