"""A dataset as slow as real ones: text in compressed blocks, behind a storage that lets one wait.

Left out: files; the blocks are compressed in memory when the dataset is made.
"""

from __future__ import annotations

import time
import zlib

import torch
from torch.utils.data import Dataset

from labkit.model.text import text

BLOCK_BYTES = 1 << 18  # of text: zlib takes about a millisecond for it
SLOW_EVERY = 24  # every so many samples storage takes longer
SLOWER = 12


class SlowText(Dataset):
    """num_samples windows of length + 1 bytes of real text, int64.

    A sample waits read_s for storage (every SLOW_EVERY-th SLOWER times as long), then unpacks its whole block.
    """

    def __init__(self, num_samples: int, length: int = 64, read_s: float = 0.002):
        data = text()
        starts = range(0, max(1, len(data) - BLOCK_BYTES), BLOCK_BYTES)
        self.blocks = [zlib.compress(data[start : start + BLOCK_BYTES]) for start in starts]
        self.num_samples, self.length, self.read_s = num_samples, length, read_s

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        time.sleep(self.read_s * (SLOWER if index % SLOW_EVERY == SLOW_EVERY - 1 else 1))
        block = zlib.decompress(self.blocks[index % len(self.blocks)])
        start = index * 7919 % (len(block) - self.length - 1)
        return torch.tensor(list(block[start : start + self.length + 1]))


class Decoded(Dataset):
    """All samples of another dataset, decoded when this one is made, and kept in memory."""

    def __init__(self, dataset: Dataset):
        self.samples = [dataset[index] for index in range(len(dataset))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]
