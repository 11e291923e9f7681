"""How many cores this process may use, by files of control groups written for the purpose."""

import importlib
import os

import pytest

from labkit.cost import cores


@pytest.fixture
def may_use(tmp_path, monkeypatch):
    """may_use(text of /proc/self/cgroup, {file: text}): the answer on a machine that shows 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def found(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return cores.usable_cores(tmp_path / "own", tmp_path / "root")

    return found


def test_without_a_limit_it_is_the_affinity(may_use):
    assert may_use("0::/\n", {}) == 64
    assert may_use("0::/\n", {"cpu.max": "max 100000\n"}) == 64


def test_a_quota_of_version_2_counts_wherever_it_is_the_lowest_on_the_way_up(may_use):
    files = {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n", "other/cpu.max": "100000 100000\n"}
    assert may_use("0::/a/b\n", files) == 2
    assert may_use("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n"}) == 0.5


V1 = "12:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n"


def test_a_quota_of_version_1_counts(may_use):
    files = {"cpu/docker/1/cpu.cfs_quota_us": "150000\n", "cpu/docker/1/cpu.cfs_period_us": "100000\n"}
    assert may_use(V1, files) == 1.5
    assert may_use(V1, {"cpu/docker/1/cpu.cfs_quota_us": "-1\n"}) == 64


def test_in_a_container_the_path_is_the_hosts_and_the_root_has_the_quota(may_use):
    files = {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert may_use(V1, files) == 2


def test_a_quota_above_the_affinity_changes_nothing(may_use):
    assert may_use("0::/\n", {"cpu.max": "9900000 100000\n"}) == 64


def test_without_the_files_it_is_what_the_system_says(tmp_path):
    assert cores.usable_cores(tmp_path / "none", tmp_path / "none") >= 1


@pytest.mark.parametrize(
    "text, count",
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("100000 0", None), ("-1 100000", None)],
)
def test_a_limit_is_quota_over_period(text, count):
    assert cores.cores_of(text) == count


@pytest.mark.parametrize(
    "text, path",
    [("0::/user.slice/a.scope\n", "/user.slice/a.scope"), ("12:cpu:/x\n0::/\n", "/"), ("4:memory:/docker/1\n", "/")],
)
def test_a_path_is_that_of_its_version(text, path):
    assert cores.group_path(text) == path
    assert cores.group_path(V1, "cpu") == "/docker/1" and cores.group_path(V1, "cpuset") == "/"


def test_the_doctor_the_laptop_and_lab_02_ask_the_same():
    for name in ("doctor.machine", "record.laptop", "labs.lab02.scaling"):
        assert importlib.import_module(f"labkit.{name}").usable_cores is cores.usable_cores
