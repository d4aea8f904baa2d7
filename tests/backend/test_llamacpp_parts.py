"""The small parts of the llama.cpp backend: the count of cores and the book of KV cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backend.llamacpp.cells import CellBook
from paceline.backend.llamacpp.threads import physical_cores
from paceline.errors import InvariantError


def machine(root: Path, cores: list[tuple[int, int]], **cgroup: str) -> dict[str, Path]:
    """A fake /sys: (package, core) of each logical processor, and the files of a cgroup."""
    for cpu, (package, core) in enumerate(cores):
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    group = root / "cgroup"
    for name, text in cgroup.items():
        file = group / name.replace("__", "/").replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"sysfs": root, "cgroup": group}


HYPERTHREADED = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]


def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    assert physical_cores(**machine(tmp_path, HYPERTHREADED), cpus=set(range(8))) == 4


def test_affinity_limits_the_cores(tmp_path: Path) -> None:
    fake = machine(tmp_path, HYPERTHREADED)
    assert physical_cores(**fake, cpus={0, 2}) == 1
    assert physical_cores(**fake, cpus={0, 1, 2, 5}) == 3


@pytest.mark.parametrize(
    "quota, expected", [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("", 4)]
)
def test_the_quota_of_a_container_counts(tmp_path: Path, quota: str, expected: int) -> None:
    assert physical_cores(**machine(tmp_path, HYPERTHREADED, cpu_max=quota), cpus=set(range(8))) == expected


@pytest.mark.parametrize("quota, expected", [("-1", 4), ("300000", 3)])
def test_the_quota_of_an_old_cgroup(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"cpu__cpu_cfs_quota_us": quota, "cpu__cpu_cfs_period_us": "100000"}
    assert physical_cores(**machine(tmp_path, HYPERTHREADED, **files), cpus=set(range(8))) == expected


def test_without_topology_every_processor_counts(tmp_path: Path) -> None:
    assert physical_cores(tmp_path, tmp_path, cpus={0, 1, 2}) == 3


def test_this_machine_has_a_core() -> None:
    assert physical_cores() >= 1


def test_cells_are_shared_until_the_last_holder_lets_go() -> None:
    book = CellBook(slots=3, capacity=10)
    book.grow(0, 6)
    book.share(0, 1)
    book.grow(1, 2)
    book.check()
    assert (book.length(0), book.length(1), book.free) == (6, 8, 2)
    book.cut(0, 2)
    assert book.free == 2  # slot 1 still holds them
    book.cut(1, 4)
    assert book.free == 6
    book.check()
    book.cut(1, 0)
    book.cut(0, 0)
    book.check()
    assert book.free == 10


def test_what_is_set_aside_must_be_free() -> None:
    book = CellBook(slots=2, capacity=4)
    assert book.reserve(0, 3)
    book.grow(0, 2)
    assert not book.reserve(1, 2)
    assert book.reserve(1, 1)
    book.check()
    book.unreserve(1, 0)
    assert book.reserve(0, 4)
    book.check()
    book._reserved[1] = 1
    with pytest.raises(InvariantError, match="3 KV cells are set aside, and 2 are free"):
        book.check()


def test_a_lost_cell_is_noticed() -> None:
    book = CellBook(slots=1, capacity=4)
    book.grow(0, 2)
    book._free.pop()
    with pytest.raises(InvariantError, match="2 should be free of 4, 1 are listed"):
        book.check()
