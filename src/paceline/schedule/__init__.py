"""Who runs in the next step, and with how many draft tokens."""

from .fcfs import Turn, admit, plan, prefill_chunk

__all__ = ["Turn", "admit", "plan", "prefill_chunk"]
