"""Who runs in the next step, and with how many tokens. Integers, queues and what things cost.

scheduler.py    who holds a slot, who waits, who gives memory back
fcfs.py         what each of them may do in a step
cost.py         what a forward costs on this machine
adaptive.py     how many drafts are worth it, given that and what is believed of their acceptance
controller.py   the beliefs, and the decision in every step
"""

from .adaptive import Acceptance, Ask, Plan, allocate
from .controller import MAX_DRAFTS, Candidate, Controller, FixedLengths
from .cost import CostTable
from .fcfs import Turn, parts, plan, prefill_chunk
from .scheduler import Scheduler

__all__ = [
    "MAX_DRAFTS",
    "Acceptance",
    "Ask",
    "Candidate",
    "Controller",
    "CostTable",
    "FixedLengths",
    "Plan",
    "Scheduler",
    "Turn",
    "allocate",
    "parts",
    "plan",
    "prefill_chunk",
]
