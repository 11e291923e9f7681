"""Texts that a system gives about itself, taken apart: nvidia-smi, /proc, cgroup files, torch's version.

Pure functions from text to values, so that a machine with eight GPUs can be tested on one with none.
Left out: running the commands and opening the files, which `software`, `machine` and `gpus` do.
"""

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`. num_bytes: its memory; driver: the driver's version."""

    index: int
    name: str
    num_bytes: int
    driver: str


def gpus(text: str) -> tuple[Gpu, ...]:
    """From `nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader,nounits`.

    nvidia-smi counts in MiB. A GPU without a memory of its own ("[N/A]") has 0 bytes.
    """
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            mebibytes = int(fields[2]) if fields[2].isdigit() else 0
            found.append(Gpu(int(fields[0]), fields[1], mebibytes * 2**20, fields[3]))
    return tuple(found)


def links(text: str) -> dict[tuple[int, int], str]:
    """From `nvidia-smi topo -m`: the link of each pair of GPUs, lower number first, e.g. {(0, 1): "NV18"}.

    From quick to slow: NV# (# NVLinks), PIX (one PCIe bridge), PXB (several), PHB (the host bridge), NODE
    (one socket), SYS (between sockets).
    """
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    found = {}
    for row in rows:
        if "X" in row and re.fullmatch(r"GPU\d+", row[0]):
            for other, kind in zip(header, row[1:], strict=False):
                if re.fullmatch(r"GPU\d+", other) and int(other[3:]) > int(row[0][3:]):
                    found[int(row[0][3:]), int(other[3:])] = kind
    return found


def links_in_words(pairs: dict[tuple[int, int], str]) -> str:
    """E.g. "NV18 between all" or "NV4 between 2 pairs, SYS between 4 pairs"."""
    kinds = Counter(pairs.values())
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all"
    return ", ".join(f"{kind} between {n} pair{'s' * (n > 1)}" for kind, n in kinds.most_common())


def available_bytes(meminfo: str) -> int | None:
    """MemAvailable of /proc/meminfo (whose kB are KiB); None when it is not there (before Linux 3.14)."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def cgroup_bytes(memory_max: str) -> int | None:
    """Bytes that a control group may hold, from `memory.max`; None when unlimited ("max")."""
    word = memory_max.strip()
    return int(word) if word.isdigit() else None


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) for "2.13.0+cpu"."""
    return tuple(int(number) for number in re.match(r"[\d.]*", version)[0].strip(".").split(".") if number)
