"""Dropout across tensor-parallel ranks: other masks inside a region, where elements are other ones; the same outside.

Outside (after g) every rank has the same tensor, and a mask of its own would make it another on each. Inside, one seed
for all would drop the same places of every rank's block (Megatron-LM, arXiv:1909.08053, appendix B.2). Left out:
a learner's part; and weights, whose init from one seed repeats a block in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.labs.lab02 import asked

HIDDEN, FFN, TOKENS, DROPPED = 64, 256, 32, 0.5


@dataclass(frozen=True)
class Masks:
    """alike: share of places inside whose fate is the same on ranks 0 and 1 (by chance 1/2). apart: the largest
    difference of the two ranks' outputs, relative to the largest element.
    """

    alike: float
    apart: float


def masks(own_inside: bool, own_outside: bool, tp: int = 2) -> Masks:
    """An MLP cut on `tp` ranks (2 or more), with dropout inside its region and after it.

    own_inside, own_outside: whether each rank draws that mask from a seed of its own, or all from one. ValueError for
    another tp or one that does not divide 256, RankFailed as `launch`.
    """
    from labkit.ranks.launch import launch

    asked.whole("tp", tp, 2, least=2, most=16)
    if FFN % tp:
        raise ValueError(f"tp divides {FFN}, and {tp} does not; tp=2 would do")
    found = launch(_in_rank, tp, own_inside, own_outside, prints="quiet")
    (kept, out), (other_kept, other_out) = found[0], found[1]
    alike = float((kept == other_kept).float().mean())
    return Masks(alike, float((out - other_out).abs().max() / out.abs().max()))


def _in_rank(own_inside: bool, own_outside: bool) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    rank, t = dist.get_rank(), dist.get_world_size()
    shared = torch.Generator().manual_seed(0)  # inputs and weights: the same on all ranks
    x, first = torch.randn(TOKENS, HIDDEN, generator=shared), torch.randn(FFN, HIDDEN, generator=shared)
    second = torch.randn(HIDDEN, FFN, generator=shared)
    inside = torch.relu(x @ first.chunk(t)[rank].T)
    kept = _mask(inside.shape, 1 + rank * own_inside)
    out = inside * kept @ second.chunk(t, 1)[rank].T
    dist.all_reduce(out)
    return kept, out * _mask(out.shape, 1000 + rank * own_outside)


def _mask(shape: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) >= DROPPED) / (1 - DROPPED)
