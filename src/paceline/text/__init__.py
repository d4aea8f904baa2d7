"""Text on its way out: incremental decoding and stop strings."""

from .detokenize import Detokenizer
from .stops import StopMatch, StopScanner, TextStream

__all__ = ["Detokenizer", "StopMatch", "StopScanner", "TextStream"]
