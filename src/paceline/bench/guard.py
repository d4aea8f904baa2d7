"""A benchmark waits for an idle machine, and runs again what other load disturbed.

What others do is read from /proc/stat: all CPU seconds that the machine was busy (stolen ones included), minus those
of whoever is being measured. Where there is no /proc the guard is off, and reports say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PROC = Path("/proc")
WINDOW_SECONDS = 0.5  # of watching before a machine counts as idle
SLACK_SECONDS = 0.05  # the kernel counts in ticks of 10 ms on each CPU
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; guests are part of user


@dataclass(frozen=True, slots=True)
class Load:
    """What others did during a run. others: CPUs they kept busy, on average. tries: how often it was run.

    disturbed: whether that was more than the limit even in the quietest of the tries.
    """

    others: float
    tries: int
    disturbed: bool


class Guard:
    """Runs work on a quiet machine.

    limit: CPUs that others may keep busy. wait_seconds: longest wait before one run; budget_seconds: of all
    waiting together, after which it only watches. tries: of one run. on: False is off.
    others(sessions): CPU seconds that others have used so far; None where that is unknown. clock, sleep: in seconds.
    say(message): told once that it waits, and for whom.
    """

    def __init__(
        self,
        *,
        on: bool = True,
        limit: float = 0.15,
        wait_seconds: float = 60.0,
        budget_seconds: float = 600.0,
        tries: int = 3,
        others: Callable[[Sequence[int]], float | None] | None = None,
        say: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit, self.wait_seconds, self.budget_seconds, self.tries = limit, wait_seconds, budget_seconds, tries
        self.waited_seconds = 0.0
        self.reruns = 0
        self._others = others or others_seconds
        self._say, self._said = say, False
        self._clock, self._sleep = clock, sleep
        self._asked_for = on
        self.on = on and self._others(()) is not None

    def run(self, work: Callable[[], T], sessions: Sequence[int] = ()) -> tuple[T, Load | None]:
        """work(), and what others did meanwhile; None where the guard is off.

        sessions: process sessions whose load is the work's own. The quietest try counts, not the fastest one.
        """
        if not self.on:
            return work(), None
        best: tuple[T, float] | None = None
        for tried in range(1, self.tries + 1):
            self._wait_for_idle()
            start, before = self._clock(), self._now(sessions)
            result = work()
            elapsed, used = self._clock() - start, self._now(sessions) - before
            others = max(0.0, used) / elapsed if elapsed > 0 else 0.0
            quiet = used <= self.limit * elapsed + SLACK_SECONDS
            if quiet or best is None or others < best[1]:
                best = (result, others)
            if quiet or self.waited_seconds >= self.budget_seconds:
                break
            self.reruns += tried < self.tries
        assert best is not None
        return best[0], Load(best[1], tried, not quiet)

    def as_json(self) -> dict[str, Any]:
        """How it was set, and what it had to do."""
        why = None if self.on else "switched off" if not self._asked_for else "this system has no /proc/stat"
        return {
            "on": self.on,
            "why_off": why,
            "limit_cpus": self.limit,
            "waited_seconds": self.waited_seconds,
            "reruns": self.reruns,
        }

    def _wait_for_idle(self) -> None:
        begun = self._clock()
        while self.waited_seconds < self.budget_seconds:
            start, before = self._clock(), self._now(())
            self._sleep(WINDOW_SECONDS)
            elapsed, used = self._clock() - start, self._now(()) - before
            if used <= self.limit * elapsed + SLACK_SECONDS / 2:
                return
            if not self._said:
                self._said = True
                self._say(
                    f"waiting until the machine is idle: others keep {max(0.0, used) / elapsed:.1f} CPUs busy, "
                    f"{self.limit:g} are allowed; for {self.budget_seconds:g} s at most, all together"
                )
            self.waited_seconds += elapsed  # the first window of a quiet machine is no waiting
            if self._clock() - begun >= self.wait_seconds:
                return

    def _now(self, sessions: Sequence[int]) -> float:
        used = self._others(sessions)
        assert used is not None, "/proc/stat was readable a moment ago"
        return used


def others_seconds(sessions: Sequence[int] = ()) -> float | None:
    """CPU seconds since boot that went neither into this process nor into those sessions; None where unknown."""
    busy = busy_seconds()
    return None if busy is None else busy - time.process_time() - session_seconds(sessions)


def busy_seconds() -> float | None:
    """CPU seconds since boot that the machine was busy or stolen from; None without a readable /proc/stat."""
    try:
        words = (PROC / "stat").read_text().splitlines()[0].split()
        return sum(int(words[1 + i]) for i in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def session_seconds(sessions: Sequence[int]) -> float:
    """CPU seconds of the processes of these sessions, and of those they have waited for."""
    if not sessions:
        return 0.0
    ticks = 0
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                # The name, in parentheses, may hold anything.
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) in sessions:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
