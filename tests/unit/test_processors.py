"""How many threads are started where nobody says, from fake /proc and /sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outpace.models.processors import cpu_quota, kind, physical_cores, usable_cores
from tests.unit.test_memory import tree

V2, V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "4:cpu,cpuacct:/a\n5:memory:/\n"}


def v2(path: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup{path}/cpu.max": text}


def v1(mount: str, path: str, quota: str) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{mount}{path}"
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2 | v2("/a/b", "max 100000\n"), None),
        (V2 | v2("/a/b", "150000 100000\n"), 1.5),
        (V2 | v2("/a/b", "max 100000\n") | v2("/a", "50000 100000\n"), 0.5),  # the group above
        (V2 | v2("", "400000 100000\n"), 4.0),  # a container that sees its group at the top
        (V2 | v2("/a/b", "nonsense\n"), None),
        (V1 | v1("cpu,cpuacct", "/a", "250000\n"), 2.5),
        (V1 | v1("cpu", "/a", "-1\n"), None),
        (V1 | v1("cpu", "", "100000\n"), 1.0),
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
