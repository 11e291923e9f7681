"""What a wrong sum over ranks tells: which known mistake of an all_reduce would give these numbers.

Used by the judges of 1.1 and 1.4. Works on the results alone, in the parent. Left out: what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import labkit.labs.lab01.inputs as inputs
from labkit.labs.lab00.inputs import same


def wrong_sum(tensors: tuple[Any, ...], outs: Sequence[Any], rank: int) -> tuple[str, str]:
    """(cause, sentence) for what `rank` returned where the sum of `tensors` was due."""
    total, n = inputs.total(tensors), len(tensors)
    out = outs[rank]
    if all(same(each, own) for each, own in zip(outs, tensors, strict=True)):
        return "unchanged", "every rank still holds its own values: nothing was added."
    if same(out, (total / n).to(total.dtype)) and n > 1:
        return (
            "average",
            f"this is the average: the sum, divided by {n} ranks. all_reduce sums unless told otherwise.",
        )
    if _nearly(out, total):
        return "dtype_lost", "the values lost precision on the way: they were added or sent as another dtype."
    wrong_at = [(each != total).flatten() for each in outs]
    edge = total.numel() - total.numel() % n
    if edge and edge < total.numel() and not any(where[:edge].any() for where in wrong_at):
        return (
            "remainder",
            f"the last {total.numel() - edge} elements, which do not divide by {n}, are left out.",
        )
    return _unfinished(tensors, outs, wrong_at) or (
        "wrong_values",
        f"rank {rank} holds numbers that are no sum over ranks: which chunk is sent, and where does what came belong?",
    )


def _unfinished(tensors: tuple[Any, ...], outs: Sequence[Any], wrong_at: list) -> tuple[str, str] | None:
    """Chunks that hold the sum over some ranks only, or more than the whole sum (inputs are positive)."""
    total = inputs.total(tensors)
    bad = [where for where in wrong_at if where.any()]
    if all(_explained(tensors, out) for out in outs):
        if len(bad) == len(outs) and all((~where).any() for where in wrong_at):
            return (
                "no_all_gather",
                "each rank has the sum of one chunk and unfinished sums elsewhere: pass them round.",
            )
        return (
            "ends_early",
            "some chunks hold the sum over some ranks only: the ring stops too early, or takes turns.",
        )
    if all((out >= total).all() for out in outs):
        return "added_twice", "a finished chunk was added to an unfinished one: in the second half, copy."
    return None


def _explained(tensors: tuple[Any, ...], out: Any) -> bool:
    """Whether every element is the sum over some neighbouring ranks."""
    n = len(tensors)
    known = out == tensors[0]
    for start in range(n):
        for length in range(1, n + 1):
            known |= out == inputs.total(tuple(tensors[(start + step) % n] for step in range(length)))
    return bool(known.all())


def _nearly(out: Any, total: Any) -> bool:
    """Whether this is the sum as float32 would have it, where the dtype is a wider one."""
    return total.element_size() == 8 and bool(((out.double() - total.double()).abs() <= 1e-5 * total.double()).all())
