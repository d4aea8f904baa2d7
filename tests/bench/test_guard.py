"""The guard on a machine whose clock and load are made up."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import guard as module
from paceline.bench.guard import Guard, others_seconds, session_seconds

from .fakes import FakeMachine


def on(machine: FakeMachine, **options: Any) -> Guard:
    return Guard(others=machine.others, clock=machine.clock, sleep=machine.sleep, **options)


def work(machine: FakeMachine, seconds: float = 2.0) -> Any:
    """Something that takes so long; it returns how often it was done."""
    count = iter(range(1, 100))

    def once() -> int:
        machine.pass_time(seconds)
        return next(count)

    return once


def test_an_idle_machine_is_looked_at_once() -> None:
    """Catches waiting, or running twice, without a reason."""
    machine = FakeMachine(lambda now: 0.02)
    guard = on(machine)
    done, load = guard.run(work(machine))
    assert (done, machine.slept) == (1, 0.5)
    assert load is not None
    assert (load.tries, load.disturbed) == (1, False)
    assert load.others == pytest.approx(0.02, abs=0.005)
    assert (guard.waited_seconds, guard.reruns) == (0.0, 0)


def test_it_waits_until_others_are_gone() -> None:
    """Catches a run that begins beside somebody else's."""
    machine = FakeMachine(lambda now: 1.0 if now < 5.0 else 0.0)
    guard = on(machine)
    _, load = guard.run(work(machine))
    assert load is not None
    assert (load.tries, load.disturbed, load.others) == (1, False, 0.0)
    assert machine.now == pytest.approx(5.0 + 0.5 + 2.0)
    assert guard.waited_seconds == pytest.approx(5.0)


def test_a_disturbed_run_is_run_again() -> None:
    """Catches a number taken beside other load that began in the middle of it."""
    machine = FakeMachine(lambda now: 1.0 if 1.0 < now < 2.0 else 0.0)
    guard = on(machine)
    done, load = guard.run(work(machine))
    assert done == 2
    assert load is not None
    assert (load.tries, load.disturbed) == (2, False)
    assert guard.reruns == 1


def test_of_disturbed_tries_the_quietest_counts() -> None:
    """Catches choosing the fastest, which flatters, or the last."""
    machine = FakeMachine(lambda now: 2.0 if now % 3.0 > 1.0 and not 3.0 < now < 6.0 else 0.4)
    guard = on(machine, wait_seconds=0.0, tries=3)
    done, load = guard.run(work(machine, 2.5))
    assert load is not None
    assert (load.tries, load.disturbed) == (3, True)
    assert done == 2
    assert load.others == pytest.approx(0.4, abs=0.05)


def test_waiting_has_an_end() -> None:
    """Catches a benchmark that never ends on a machine that never is idle."""
    machine = FakeMachine(lambda now: 1.0)
    guard = on(machine, wait_seconds=10.0, budget_seconds=25.0)
    loads = [guard.run(work(machine))[1] for _ in range(5)]
    assert guard.waited_seconds <= 25.5
    assert all(load is not None and load.disturbed for load in loads)
    assert loads[-1] is not None
    assert loads[-1].tries == 1  # nothing is repeated any more
    assert machine.now < 25.5 + 15 * 2.0


def test_a_tick_of_the_kernel_is_no_load() -> None:
    """Catches short runs that count as disturbed because the kernel counts in steps of 10 ms."""
    machine = FakeMachine(lambda now: 0.0)
    guard = on(machine)

    def short() -> None:
        machine.pass_time(0.05)
        machine.used += 0.02

    _, load = guard.run(short)
    assert load is not None
    assert (load.tries, load.disturbed) == (1, False)


def test_it_is_off_where_it_is_told_or_cannot_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a guard that blocks, or claims to have watched, on a system without /proc."""
    assert Guard(on=False).run(lambda: 3) == (3, None)
    assert Guard(on=False).as_json()["why_off"] == "switched off"
    monkeypatch.setattr(module, "PROC", tmp_path)
    blind = Guard()
    assert blind.run(lambda: 3) == (3, None)
    assert blind.as_json()["why_off"] == "this system has no /proc/stat"


@pytest.mark.skipif(others_seconds() is None, reason="no /proc/stat")
def test_the_work_of_a_session_is_not_others() -> None:
    """Catches a peer's own work counted as disturbing it. Counts only: no claim about how fast it is."""
    spin = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, start_new_session=True, stdout=subprocess.DEVNULL
    )
    with process:
        until = time.monotonic() + 30
        while session_seconds((process.pid,)) < 0.28 and time.monotonic() < until:
            time.sleep(0.05)
        seen = session_seconds((process.pid,))
        process.communicate(b"\n")
    assert 0.28 <= seen < 5
    assert session_seconds(()) == 0.0


def test_it_says_once_that_it_waits() -> None:
    """Ten silent minutes look like a program that hangs."""
    said: list[str] = []
    now, busy = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        busy[0] += 1.5 * seconds if now[0] < 5 else 0.0

    guard = Guard(others=lambda _: busy[0], say=said.append, clock=lambda: now[0], sleep=sleep)
    guard.run(lambda: None)
    guard.run(lambda: None)
    assert len(said) == 1
    assert "others keep 1.5 CPUs busy, 0.15 are allowed; for 600 s at most" in said[0]
    quiet = Guard(others=lambda _: 0.0, say=said.append, clock=lambda: now[0], sleep=sleep)
    quiet.run(lambda: None)
    assert len(said) == 1
