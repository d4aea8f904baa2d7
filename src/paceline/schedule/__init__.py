"""Who runs in the next step, and with how many tokens. Integers and queues only."""

from .fcfs import Turn, parts, plan, prefill_chunk
from .scheduler import Scheduler

__all__ = ["Scheduler", "Turn", "parts", "plan", "prefill_chunk"]
