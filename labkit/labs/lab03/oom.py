"""What an out-of-memory message and nvidia-smi's list say: too little memory, or memory in gaps, or strangers.

torch's message has said the same figures since 2.1 (c10/cuda/CUDACachingAllocator.cpp). Left out: any GPU; texts
are read wherever they come from.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
CROWDED = 0.1  # of the device: a context and libraries have less
GAP = 0.2  # of what is reserved: above, gaps are worth a try; below, they cannot be the reason


@dataclass(frozen=True)
class Shortage:
    """Bytes from an out-of-memory message. gaps: reserved by torch and not allocated. capacity: the whole device's."""

    wanted: int
    capacity: int
    free: int
    allocated: int
    gaps: int

    @property
    def share(self) -> float:
        """Of what torch has reserved, what lies in gaps."""
        return self.gaps / (self.allocated + self.gaps)

    @property
    def outside(self) -> int:
        """What torch in this process does not have: contexts, libraries, other processes."""
        return max(0, self.capacity - self.free - self.allocated - self.gaps)

    @property
    def fragmented(self) -> bool:
        return self.share > GAP

    @property
    def sentence(self) -> str:
        held = f"{self.allocated / 2**30:.2f} GiB are allocated, {self.gaps / 2**30:.2f} GiB ({self.share:.0%}) in gaps"
        held += f", {self.outside / 2**30:.2f} GiB outside torch"
        if self.fragmented:
            told = f"{held}: fragmentation. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        else:
            told = f"{held}: a real shortage. No allocator setting finds {self.wanted / 2**30:.2f} GiB more."
        if self.outside > CROWDED * self.capacity:
            told += " First see in nvidia-smi who holds what is outside torch: a context alone has no such size."
        return told


def read_oom(text: str) -> Shortage:
    """The figures of torch's CUDA out-of-memory message. ValueError where it is none."""
    patterns = {
        "wanted": r"Tried to allocate ([\d.]+) (\w+)",
        "capacity": r"total capaci?ty of ([\d.]+) (\w+)",  # torch 2.1 wrote "capacty"
        "free": r"of which ([\d.]+) (\w+) is free",
        "allocated": r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch",
        "gaps": r"([\d.]+) (\w+) is reserved by PyTorch but unallocated",
    }
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    missing = [name for name, match in found.items() if match is None or match[2] not in UNITS]
    if missing:
        raise ValueError(f"this is not torch's out-of-memory message: no figure for {', '.join(missing)}")
    return Shortage(**{name: round(float(match[1]) * UNITS[match[2]]) for name, match in found.items()})


def strays(processes: Sequence[tuple[int, int, float]]) -> tuple[tuple[int, int, float], ...]:
    """Of (GPU, process id, MiB): those on a GPU on which a process has less than on another, as a context alone has.

    A rank that calls CUDA before torch.cuda.set_device, or loads a file without map_location, makes a context on GPU 0.
    """
    most: dict[int, float] = {}
    for _, pid, mib in processes:
        most[pid] = max(most.get(pid, 0.0), mib)
    return tuple(each for each in processes if each[2] < most[each[1]])
