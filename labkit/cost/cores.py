"""How many cores this process may use: those it may run on, or its control groups' share where that is less.

A container with 2 of a machine's 64 cores sees 64; what it may use stands in files of its control groups, version 2
(`cpu.max`) or 1 (`cpu.cfs_quota_us`). Left out: limits that come and go (cpu.shares, cpu.weight), and other systems'.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SELF, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores(own: Path = SELF, root: Path = ROOT) -> float:
    """Cores that this process may use, 0.5 for half of one's time.

    own: the file that says which control groups it is in; root: where they are mounted. Without them its affinity is
    the answer, and where a system has none (macOS), the machine's number of cores.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [cores_of(text) for text in group_files("cpu.max", own=own, root=root)]
    quotas = group_files("cpu.cfs_quota_us", "cpu", own, root)
    periods = group_files("cpu.cfs_period_us", "cpu", own, root)
    limits += [cores_of(f"{quota} {period}") for quota, period in zip(quotas, periods, strict=False)]
    return min([float(affinity), *(limit for limit in limits if limit)])


def cores_of(cpu_max: str) -> float | None:
    """Cores a control group may use, from `cpu.max` ("150000 100000" is 1.5), or quota and period of version 1.

    None when unlimited ("max", a quota of -1).
    """
    words = cpu_max.split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or words[1] == "0":
        return None
    return int(words[0]) / int(words[1])


def group_path(proc_cgroup: str, controller: str = "") -> str:
    """A process's path in the tree of a controller of version 1, or in that of version 2 (""); "/" where none is.

    From the text of /proc/self/cgroup: "0::/user.slice", "4:cpu,cpuacct:/docker/1".
    """
    for line in proc_cgroup.splitlines():
        found = re.fullmatch(r"(\d+):([^:]*):(/.*)", line)
        if found and (controller in found[2].split(",") if controller else found[1] == "0"):
            return found[3]
    return "/"


def group_files(name: str, controller: str = "", own: Path = SELF, root: Path = ROOT) -> list[str]:
    """The texts of a file of this process's control groups, from its own group up to the root.

    controller: of version 1; "" for version 2. In a container the path is often the host's, and only the root is there.
    """
    root = root / controller
    try:
        group = root / group_path(own.read_text(), controller).lstrip("/")
    except OSError:
        return []
    folders = [folder for folder in [group, *group.parents] if folder.is_relative_to(root)]
    return [text for folder in folders if (text := _read(folder / name)) is not None]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
