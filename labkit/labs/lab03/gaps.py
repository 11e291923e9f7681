"""A caching allocator in small: how memory that is free in sum is still not there in one piece.

As torch's on a GPU (c10/cuda/CUDACachingAllocator.cpp), for large tensors: sizes are rounded up to 512 bytes; a request
takes the smallest free block that holds it and leaves the rest free; where none does, a new segment is taken from the
device, 20 MiB or more in steps of 2 MiB; freed neighbours of a segment join; nothing is given back. With `expandable`
there is one segment, that grows. Left out: the pool for small tensors, streams, and giving back before an error.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 2**20
ROUND, SEGMENT, STEP = 512, 20 * MIB, 2 * MIB


@dataclass(frozen=True)
class Block:
    """A piece of a segment. owner: number of the tensor that has it, None for a gap."""

    start: int
    size: int
    owner: int | None = None


@dataclass(frozen=True)
class Filled:
    """What an allocator did. allocated, reserved: bytes after each event. segments: their blocks at the end."""

    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    segments: tuple[tuple[Block, ...], ...]

    @property
    def gaps(self) -> int:
        """Bytes reserved and not allocated, at the end."""
        return self.reserved[-1] - self.allocated[-1]

    @property
    def largest_gap(self) -> int:
        return max((b.size for segment in self.segments for b in segment if b.owner is None), default=0)


def rounded(size: int, step: int = ROUND) -> int:
    """Up to a multiple of `step`."""
    return -(-size // step) * step


def filled(events: Sequence[tuple[int, int]], expandable: bool = False) -> Filled:
    """Go through (tensor, bytes) for one that is made, (tensor, 0) for one that is freed."""
    segments: list[list[Block]] = []
    allocated, reserved, now = [], [], 0
    for owner, size in events:
        if size:
            now += rounded(size)
            _take(segments, owner, rounded(size), expandable)
        else:
            now -= _give(segments, owner)
        allocated.append(now)
        reserved.append(sum(block.size for segment in segments for block in segment))
    return Filled(tuple(allocated), tuple(reserved), tuple(map(tuple, segments)))


def _take(segments: list[list[Block]], owner: int, size: int, expandable: bool) -> None:
    fit = [(block.size, s, b) for s, segment in enumerate(segments) for b, block in enumerate(segment)
           if block.owner is None and block.size >= size]  # fmt: skip
    if not fit:
        _grow(segments, size, expandable)
        return _take(segments, owner, size, expandable)
    _, s, b = min(fit)
    block = segments[s][b]
    rest = [Block(block.start + size, block.size - size)] if block.size > size else []
    segments[s][b : b + 1] = [Block(block.start, size, owner), *rest]
    return None


def _grow(segments: list[list[Block]], size: int, expandable: bool) -> None:
    if not expandable or not segments:
        least = STEP if expandable else SEGMENT
        segments.append([Block(0, max(least, rounded(size, STEP)))])
        return
    segment = segments[0]
    last = segment[-1]
    have = last.size if last.owner is None else 0
    more = rounded(size - have, STEP)
    if have:
        segment[-1] = Block(last.start, have + more)
    else:
        segment.append(Block(last.start + last.size, more))


def _give(segments: list[list[Block]], owner: int) -> int:
    """Free a tensor's block and join it with free neighbours. Gives its size."""
    for segment in segments:
        for at, block in enumerate(segment):
            if block.owner == owner:
                segment[at] = Block(block.start, block.size)
                for left in (at, at - 1):
                    if 0 <= left < len(segment) - 1 and segment[left].owner is segment[left + 1].owner is None:
                        one, other = segment[left : left + 2]
                        segment[left : left + 2] = [Block(one.start, one.size + other.size)]
                return block.size
    raise ValueError(f"tensor {owner} is not there to be freed")


def batches_of_changing_length(count: int = 12, seed: int = 0) -> list[tuple[int, int]]:
    """Events of a training whose batches differ in length: a few tensors in proportion to it a step, a little kept.

    Each step makes four tensors of 2 to 12 MiB, frees those of the step before, and keeps one in three small ones.
    """
    rng, events, alive, number = random.Random(seed), [], [], 0
    for step in range(count):
        length, made = rng.uniform(0.4, 1.6), []
        for share in (3, 5, 6, 7):
            events.append((number, int(share * length * MIB)))
            made.append(number)
            number += 1
        if step % 3 == 0:
            events.append((number, int(0.7 * length * MIB)))  # a metric, an exponential average: it stays
            number += 1
        events += [(old, 0) for old in alive]
        alive = made
    return events
