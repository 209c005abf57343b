"""What memory may be taken, and how many threads are started, from fake /proc and /sys trees and a fake card."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outpace.errors import MemoryLimitError
from outpace.models.host import (
    available_memory,
    cpu_quota,
    free_memory,
    kind,
    physical_cores,
    spare_memory,
    usable_cores,
)

G = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(free: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 1 kB\nMemFree: 5 kB\nMemAvailable:   {free // 1024} kB\n"}


def v2(path: str, limit: int | str, usage: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 7\nactive_file {G}\ninactive_file {inactive}\n",
    }


def v1(path: str, limit: int, usage: int, inactive: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


V2, V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "12:pids:/x\n4:cpu,memory:/a\n0::/a\n"}
UNLIMITED = 0x7FFFFFFFFFFFF000  # version 1 has no word for it


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (meminfo(20 * G), 20 * G),
        ({}, None),
        (V2 | meminfo(20 * G) | v2("/a/b", "max", 3 * G), 20 * G),
        (V2 | meminfo(20 * G) | v2("/a/b", 8 * G, 5 * G, inactive=2 * G), 5 * G),
        (V2 | meminfo(4 * G) | v2("/a/b", 8 * G, 2 * G), 4 * G),
        (V2 | meminfo(20 * G) | v2("/a/b", "max", 2 * G) | v2("/a", 6 * G, 5 * G), 1 * G),  # the group above
        (V2 | meminfo(20 * G) | v2("", 6 * G, 2 * G), 4 * G),  # a container that sees its group at the top
        (V2 | meminfo(20 * G) | v2("/a/b", 2 * G, 3 * G), 0),  # over its limit already
        (V1 | meminfo(20 * G) | v1("/a", 8 * G, 5 * G, G), 4 * G),
        (V1 | meminfo(20 * G) | v1("/a", UNLIMITED, 5 * G, G), 20 * G),
        (V1 | meminfo(20 * G) | v1("", 3 * G, G, 0), 2 * G),
        (V2 | meminfo(20 * G) | {"sys/fs/cgroup/a/b/memory.max": "1000"}, 20 * G),  # no usage: nothing is known
    ],
)
def test_host_memory(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path, files)) == expected


def test_half_of_what_the_weights_leave(tmp_path: Path) -> None:
    root = tree(tmp_path, V2 | meminfo(20 * G) | v2("/a/b", 8 * G, 2 * G))
    assert spare_memory("cpu", 2 * G, root) == 2 * G
    with pytest.raises(MemoryLimitError, match=r"the weights need 7\.0 GiB, but 6\.0 GiB are free: use a smaller"):
        spare_memory("cpu", 7 * G, root)
    assert spare_memory("cpu", 7 * G, tmp_path / "nothing") is None


def test_a_cards_memory_is_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cards = {0: (10 * G, 16 * G), 1: (70 * G, 80 * G)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: cards[device.index or 0])
    root = tree(tmp_path, meminfo(G))  # weights on a card take nothing of the host's budget
    assert spare_memory("cuda", 6 * G, root) == 2 * G
    assert spare_memory("cuda:1", 6 * G, root) == 32 * G
    with pytest.raises(MemoryLimitError, match=r"but 10\.0 GiB are free on cuda:0"):
        spare_memory("cuda:0", 11 * G, root)
    assert free_memory("mps", root) is None


def test_this_machine_says() -> None:
    free = available_memory()
    assert free is not None
    assert free > 0


CPU1 = {"proc/self/cgroup": "4:cpu,cpuacct:/a\n5:memory:/\n"}


def cpu2(path: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup{path}/cpu.max": text}


def cpu1(mount: str, path: str, quota: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{mount}{path}"
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2 | cpu2("/a/b", "max 100000\n"), None),
        (V2 | cpu2("/a/b", "150000 100000\n"), 1.5),
        (V2 | cpu2("/a/b", "max 100000\n") | cpu2("/a", "50000 100000\n"), 0.5),  # the group above
        (V2 | cpu2("", "400000 100000\n"), 4.0),  # a container that sees its group at the top
        (V2 | cpu2("/a/b", "nonsense\n"), None),
        (CPU1 | cpu1("cpu,cpuacct", "/a", "250000\n"), 2.5),
        (CPU1 | cpu1("cpu", "/a", "-1\n"), None),
        (CPU1 | cpu1("cpu", "", "100000\n"), 1.0),
    ],
)
def test_a_quota_bounds_the_threads(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    root = tree(tmp_path, files)
    assert cpu_quota(root) == quota
    cores = physical_cores(root)
    assert cores == len(os.sched_getaffinity(0))  # nothing says which of them are siblings
    assert usable_cores(root) == (cores if quota is None else max(1, min(cores, -int(-quota // 1))))


def test_siblings_count_once(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    where = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    tree(tmp_path, {where.format(cpu): f"{cpus[0]}-{cpus[-1]}\n" for cpu in cpus})
    assert physical_cores(tmp_path) == 1


def test_a_processor_is_named_with_its_model_number(tmp_path: Path) -> None:
    one = "model\t\t: 85\nmodel name\t: Some Processor\ncpu family\t: 6\nflags\t\t: avx2 fma\n\n"
    assert kind(tree(tmp_path / "a", {"proc/cpuinfo": one + one.replace("85", "86")})) == (
        "Some Processor (family 6 model 85)", frozenset({"avx2", "fma"}),
    )  # fmt: skip
    name, flags = kind(tree(tmp_path / "b", {}))
    assert name
    assert not flags
