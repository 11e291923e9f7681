"""What exercise 4.5 is asked to save: flat tensors whose sizes do not divide, and crash states of a folder.

Everything is drawn from a seed. Left out: what ranks do (`checkpoint_ranks`), and the verdict (`checkpoint`).
"""

from __future__ import annotations

import os
import random
import shutil
import zlib
from dataclasses import dataclass
from typing import Any

NUM_RANKS = 4  # that save; others load
# Steps as text sort otherwise: "9" is after "10".
# A step may be saved twice: training went back, or its last step is one that is saved anyway.
STEPS = (9, 9, 10, 100)


@dataclass(frozen=True)
class Content:
    """One checkpoint: its step, and whole flat tensors by name, without padding."""

    step: int
    tensors: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in self.tensors.items()}

    def shards(self, rank: int, world_size: int) -> dict[str, Any]:
        """A rank's part of each, padded with zeros to equal parts."""
        return {name: part_of(tensor, rank, world_size) for name, tensor in self.tensors.items()}

    def shard_bytes(self, world_size: int) -> int:
        """Bytes of a rank's parts together."""
        return sum(each.nbytes for each in self.shards(0, world_size).values())


def part_of(tensor: Any, rank: int, world_size: int) -> Any:
    """Part `rank` of `world_size` equal ones of a flat tensor, the last ones padded with zeros."""
    import torch

    size = -(-tensor.numel() // world_size)
    mine = tensor[rank * size : (rank + 1) * size]
    return torch.cat([mine, tensor.new_zeros(size - mine.numel())])


def contents(rng: random.Random) -> list[Content]:
    """Four checkpoints of the same tensors, two of them of one step. Sizes are 1 above a multiple of 4, so that parts
    of 2, 3 and 4 ranks all have another sum; of one tensor most ranks have padding alone.
    """
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    large, middle, small = (4 * rng.randint(low, low + 200) + 1 for low in (4000, 1000, 500))

    def drawn() -> dict[str, Any]:
        return {
            "parameters": torch.randn(large, generator=generator),
            "exp_avg": torch.randn(middle, generator=generator),
            "rounded": torch.randn(small, generator=generator).bfloat16(),
            "seen": torch.randint(1, 2**40, (1,), generator=generator),
        }

    return [Content(step, drawn()) for step in STEPS]


def padded(content: Content) -> int:
    """Padded elements of the tensors, as NUM_RANKS hold them."""
    return sum(-size % NUM_RANKS for size in content.sizes.values())


def files(folder: str) -> dict[str, tuple[int, int, int]]:
    """Every file below a folder, by relative path: (inode, time of its last change, bytes)."""
    found = {}
    for where, folders, names in os.walk(folder):
        for name in names + [each for each in folders if os.path.islink(os.path.join(where, each))]:
            path = os.path.join(where, name)
            at = os.lstat(path)
            found[os.path.relpath(path, folder)] = (at.st_ino, at.st_mtime_ns, at.st_size)
    return found


def digest(folder: str) -> int:
    """A number for names and bytes of all files below a folder: equal for equal folders."""
    value = 0
    for where, folders, names in sorted(os.walk(folder)):
        folders.sort()
        value = zlib.crc32(os.path.relpath(where, folder).encode(), value)
        links = [each for each in folders if os.path.islink(os.path.join(where, each))]
        for name in sorted(names + links):
            path = os.path.join(where, name)
            value = zlib.crc32(name.encode(), value)
            if os.path.islink(path):
                value = zlib.crc32(os.readlink(path).encode(), value)
                continue
            with open(path, "rb") as file:
                value = zlib.crc32(file.read(), value)
    return value


def copied(source: str, target: str) -> str:
    """A copy of a folder, links as links; an empty one where there is none. Gives `target`."""
    if os.path.isdir(source):
        shutil.copytree(source, target, symlinks=True)
    else:
        os.makedirs(target)
    return target


def truncate(path: str, share: float = 0.0) -> None:
    """Cut a file to a share of its bytes, as a crash in the midst of writing it leaves it."""
    os.truncate(path, int(os.path.getsize(path) * share))
