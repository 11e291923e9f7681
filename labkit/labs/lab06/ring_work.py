"""How much a rank multiplies in ring attention (6.6), from its record: whether it works on what the mask empties.

Products count as torch counts them. It has no count for its attention kernel on a CPU, nor for what is multiplied
element by element and then added up (or row by row, by mv and dot): these are told from the bytes that they read and
write. Left out: the kernel on some heads at a time, which counts too low; products inside other ops that torch has no
count for (cdist, bilinear), and work on fewer blocks than half of those that the mask empties.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import labkit.labs.lab06.seen as seen
from labkit.check.evidence import Observed
from labkit.labs.lab06.functions import Case

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
MULTIPLY = ("mul", "mul_", "addcmul", "addcmul_", "mv", "addmv", "addmv_", "dot", "vdot", "addr", "ger", "inner")
SPARE = 1.15  # what else is multiplied element by element: scores by the scale, sums by exp(old - new)
# The own keys are 3 blocks (4 where both chunks are taken together), another rank's 2, however a block is multiplied.
# With all that the mask empties it is 4 to 4, and 3.5 to 3 where scores alone are made for nothing.
OWN_TO_OTHER = 4 / 3


def of_blocks(case: Case, record: Any, part: seen.Part) -> tuple[float, float]:
    """What forward and backward multiply, in blocks: what forward needs for one chunk of queries with one of keys."""
    batch, heads, length, dim = case.inputs(0)[0].shape
    block = 4 * batch * heads * (length // 2) ** 2 * dim
    ends = (part.begin, part.middle), (part.middle, part.end)
    return tuple(sum(_flops(op, batch * heads, dim) for op in _between(record, *each)) / block for each in ends)


def of_ranks(case: Case, observed: Observed) -> tuple[float, float]:
    """What forward and backward multiply, a mean over ranks."""
    found = []
    for record in observed.records:
        (part,) = seen.parts(record, 1, made=False)
        found.append(of_blocks(case, record, part))
    forward, backward = zip(*found, strict=True)
    return mean(forward), mean(backward)


def hops(one: float, other: float, n: int, fewer: int) -> tuple[float, float]:
    """(blocks of the own keys, of each hop of others') from what is multiplied among n ranks, and among fewer."""
    hop = (one - other) / (n - fewer)
    return one - (n - 1) * hop, hop


def most(n: int) -> tuple[float, float]:
    """Blocks that are enough for the 2n + 1 that the mask leaves: one more, where the own chunks are taken together.

    In backward a block takes five products, and a sixth where its output is worked out again: two are a block.
    """
    return SPARE * (2 * n + 2), SPARE * 3 * (2 * n + 2)


def _between(record: Any, begin: int, end: int) -> list[Any]:
    return [op for op in record.ops if begin < op.index <= end and not op.view]


def _flops(op: Any, heads: int, dim: int) -> float:
    """heads: of all rows of the batch."""
    name, read, written = op.name.split(".")[1], op.read_bytes / 4, op.written_bytes / 4
    if op.flops:
        return op.flops
    if name == KERNEL:  # reads q, k and v (and a mask), writes the output and a number per query
        queries = written / (dim + 1)
        return 4 * dim * queries * (read / dim - queries) / 2 / heads
    if name == f"{KERNEL}_backward":  # reads these, their output, its gradient and the numbers; writes three gradients
        queries = (read - written) / (2 * dim + 1)
        return 10 * dim * queries * (written / dim - queries) / 2 / heads
    return 2 * max(read, written) if name in MULTIPLY else 0.0
