"""Inputs of lab 01's checks: whole numbers, small enough that their sum over ranks is exact in any order of adding.

So a check can ask for equality, and a right answer is right whatever its ring starts with. Left out: expected
values; each judge makes its own from what it sent.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The largest number drawn: sums over 8 ranks are still exact, and where there is room they do not fit in float32.
LARGEST = {"float32": 2**20, "float64": 2**49, "int64": 2**57, "int32": 2**27, "bfloat16": 15}


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of whole numbers from 1 to LARGEST[dtype]."""
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    drawn = torch.randint(1, LARGEST[dtype] + 1, shape, generator=generator, dtype=torch.int64)
    return drawn.to(getattr(torch, dtype))


def total(tensors: tuple[Any, ...]) -> torch.Tensor:
    """The sum over ranks, in their dtype."""
    summed = tensors[0].clone()
    for other in tensors[1:]:
        summed += other
    return summed


def split(rng: random.Random, parts: int, rest: int) -> tuple[int, int]:
    """A shape of two odd dims whose number of elements leaves `rest` when it is divided by `parts`."""
    while True:
        shape = (2 * rng.randint(1, 6) + 1, 2 * rng.randint(2, 12) + 1)
        if shape[0] * shape[1] % parts == rest and shape[0] * shape[1] > parts:
            return shape
