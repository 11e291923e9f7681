"""Residual layers of different kinds and widths: what exercise 3.3 checkpoints, and what each keeps and costs.

"gelu": two matrices and a GELU between; "swiglu": three matrices, as in a Llama; "deep": three matrices in a row.
x is (tokens, hidden), and what a layer keeps contains its input. Left out: attention, for which a CPU's record has no
FLOPs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("gelu", "swiglu", "deep")


@dataclass(frozen=True)
class Block:
    """A layer of a kind and a width, on so many tokens; numbers are in fp32."""

    kind: str
    tokens: int
    hidden: int
    ffn: int

    @property
    def input_bytes(self) -> int:
        """What is kept where the layer is checkpointed: its input."""
        return 4 * self.tokens * self.hidden

    @property
    def kept_bytes(self) -> int:
        """What autograd keeps otherwise: the input, and the wide tensors (gelu 2, swiglu 4, deep 4)."""
        return self.input_bytes + 4 * self.tokens * self.ffn * (2 if self.kind == "gelu" else 4)

    @property
    def forward_flops(self) -> int:
        """Of one forward: its matrices."""
        wide = 2 * self.tokens * self.hidden * self.ffn
        if self.kind == "deep":
            return 2 * wide + 2 * self.tokens * self.ffn**2
        return wide * (2 if self.kind == "gelu" else 3)

    @property
    def costs(self) -> tuple[int, int, int]:
        return self.kept_bytes, self.input_bytes, self.forward_flops


def module(block: Block) -> Any:
    """The layer as a torch module, its weights drawn with torch's current seed."""
    from labkit.labs.lab03.residual import Residual

    return Residual(block)


def peak_bytes(blocks: Sequence[Block], chosen: Sequence[bool]) -> int:
    """Most bytes kept at once, if the layers with True in `chosen` are checkpointed.

    Backward goes from the last layer to the first: at a layer's turn all earlier ones hold what they keep, the later
    ones nothing any more, and the layer itself has everything, kept or recomputed (Chen et al., arXiv:1604.06174).
    """
    held = most = 0
    for block, again in zip(blocks, chosen, strict=True):
        most = max(most, held + block.kept_bytes)
        held += block.input_bytes if again else block.kept_bytes
    return most


def recomputed_flops(blocks: Sequence[Block], chosen: Sequence[bool]) -> int:
    """FLOPs of the second forward of the checkpointed layers."""
    return sum(block.forward_flops for block, again in zip(blocks, chosen, strict=True) if again)


@dataclass(frozen=True)
class Way:
    """One way to checkpoint: True where a layer is, the peak, what is held at the end of forward, FLOPs again."""

    chosen: tuple[bool, ...]
    peak_bytes: int
    end_bytes: int
    flops: int


@functools.lru_cache(maxsize=8)
def ways(blocks: tuple[Block, ...]) -> tuple[Way, ...]:
    """Every way to checkpoint some of the layers."""
    found = [Way((), 0, 0, 0)]
    for block in blocks:
        kept, inputs, flops = block.costs
        found = [
            Way(
                (*way.chosen, again),
                max(way.peak_bytes, way.end_bytes + kept),
                way.end_bytes + (inputs if again else kept),
                way.flops + (flops if again else 0),
            )
            for way in found
            for again in (False, True)
        ]
    return tuple(found)


def best(blocks: tuple[Block, ...], budget_bytes: int) -> tuple[bool, ...] | None:
    """The choice that fits with the least recomputation; None where nothing fits."""
    fit = [way for way in ways(blocks) if way.peak_bytes <= budget_bytes]
    return min(fit, key=lambda way: way.flops).chosen if fit else None
