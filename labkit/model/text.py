"""Real text to train on: Python's own language reference, which every installation carries, as bytes.

A token is a byte, so the vocabulary has 256. Left out: tokenizers and downloads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCABULARY = 256


@functools.cache
def text() -> bytes:
    """All topics of `pydoc_data.topics`, sorted by name, one after the other (about 0.7 MB; the exact text differs
    between Python versions)."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def batches(
    batch: int, length: int, seed: int = 0, rank: int = 0, world_size: int = 1, steps: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Seeded batches of `batch` windows: (inputs, targets), each int64 of shape (batch, length).

    Targets are the inputs one byte on. Ranks share one shuffled order of windows and take `batch` of them in
    turn, so no two ranks see the same window within a pass over the text, and the batches of all ranks, put
    together in rank order, are those of one rank with batch * world_size. `steps`: how many; None for no end.
    Raises ValueError for a rank outside 0..world_size-1, or windows longer than the text.
    """
    import torch

    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in 0..{world_size - 1}")
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    windows = (len(data) - 1) // length
    if windows < 1:
        raise ValueError(f"a window of {length} bytes is longer than the text ({len(data)} bytes)")
    step = 0
    while steps is None or step < steps:
        first = (step * world_size + rank) * batch
        starts = [_window(first + i, windows, seed) * length for i in range(batch)]
        rows = torch.stack([data[start : start + length + 1] for start in starts]).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        step += 1


def _window(number: int, windows: int, seed: int) -> int:
    """Which window comes at place `number` of an endless order that is shuffled anew at each pass."""
    return _order(windows, seed, number // windows)[number % windows]


@functools.lru_cache(maxsize=8)
def _order(windows: int, seed: int, epoch: int) -> tuple[int, ...]:
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return tuple(torch.randperm(windows, generator=generator).tolist())
