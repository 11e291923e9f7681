"""What wrong norms and wrong factors of exercise 4.4 tell: which known mistake would give these numbers.

Works on what ranks gave back, in the parent. Left out: what was sent (`clip`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Shards = Sequence[Sequence[Any]]  # by rank, that rank's tensors
# Relative: rounding of sums in another order, and a small eps beside the norm, stay far below.
TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}


def squares(tensors: Sequence[Any]) -> float:
    """The sum of squares, in float64."""
    return sum(float(tensor.double().pow(2).sum()) for tensor in tensors)


def tolerance(shards: Shards) -> float:
    """How far a norm may be off, as a share of it."""
    return TOLERANCE[str(shards[0][0].dtype).removeprefix("torch.")]


def near(got: float, due: float, within: float) -> bool:
    """Whether a number is `due` but for rounding; nan is near nothing."""
    return abs(got - due) <= within * abs(due) + 1e-12


def scaled(got: Any, tensor: Any, factor: float) -> bool:
    """Whether `got` is `tensor` times a factor, but for rounding; a factor of 1 allows none."""
    if factor == 1.0:
        return bool(got.equal(tensor))
    within = TOLERANCE[str(tensor.dtype).removeprefix("torch.")]
    due = tensor.double() * factor
    return bool(((got.double() - due).abs() <= within * due.abs() + 1e-7 * float(due.abs().max())).all())


def wrong_norm(shards: Shards, max_norm: float, outs: Sequence[float], rank: int) -> tuple[str, str]:
    """(cause, sentence) for the norms that ranks returned, the first wrong one being `rank`'s."""
    parts = [squares(mine) for mine in shards]
    total, within = math.sqrt(sum(parts)), tolerance(shards)
    if any(map(math.isnan, outs)) and total:
        return "not_a_number", f"rank {rank} returned nan, from gradients that are finite."
    if all(near(out, math.sqrt(part), within) for out, part in zip(outs, parts, strict=True)):
        return "local_norm", (
            f"rank {rank} returned the norm of its own shards: add the squares up over the ranks, before the root."
        )
    for due, cause, sentence in _known_norms(shards, max_norm):
        if all(near(out, due, within) for out in outs):
            return cause, sentence
    wrong = [not near(out, total, within) for out in outs]
    if not all(wrong):
        return "ranks_differ", f"rank {wrong.index(False)} returned the norm and rank {rank} did not: all must agree."
    if any(map(math.isinf, outs)):
        return "overflow", "squares of float16 go beyond 65,504: add them up in float32."
    if all(near(out, total, 20 * within) for out in outs):
        return "nearly_right", "the norm is nearly right: was it added up in a narrow dtype, or is an eps too large?"
    return "wrong_norm", f"rank {rank} returned another number than the norm of all shards of all ranks."


def _known_norms(shards: Shards, max_norm: float) -> list[tuple[float, str, str]]:
    """(number, cause, sentence) of norms that one mistake gives on every rank."""
    parts = [squares(mine) for mine in shards]
    own, total, n = [math.sqrt(part) for part in parts], math.sqrt(sum(parts)), len(parts)
    of_tensors = [sum(math.sqrt(squares([tensor])) for tensor in mine) for mine in shards]
    every = [tensor.double().abs() for mine in shards for tensor in mine]
    largest, absolute = max(float(t.max()) for t in every), sum(float(t.sum()) for t in every)
    root = "sum their squares, then take the root."
    return [
        (sum(own), "norms_added", "norms do not add up, their squares do: sum, then take the root."),
        (max(own), "largest_norm", "this is the largest norm of a rank: squares are summed over ranks."),
        (sum(parts), "not_rooted", "this is the sum of squares: its root is the norm."),
        (sum(own) / n, "mean_norm", f"this is the mean of the ranks' norms: {root}"),
        (
            total / math.sqrt(n),
            "mean_of_squares",
            "squares were averaged over the ranks; the shards are parts of one gradient: sum them.",
        ),
        (math.sqrt(total), "rooted_twice", "this is the root of the norm: the root is taken once."),
        (math.hypot(*of_tensors), "norms_added", "the norms of a rank's tensors were added: add their squares."),
        (
            min(total, max_norm),
            "after_clipping",
            "this is the norm after clipping: return the one before, which tells whether training is well.",
        ),
        (
            largest,
            "largest_element",
            "this is the largest element, the norm of order infinity; due is the root of the sum of squares.",
        ),
        (absolute, "absolute_values", "this is the sum of absolute values; due is the root of the sum of squares."),
    ]


def wrong_factor(shards: Shards, got: Shards, max_norm: float, rank: int, place: int) -> tuple[str, str]:
    """(cause, sentence) for shards that were not scaled as is due, the first being `rank`'s shard `place`."""
    total = math.sqrt(sum(squares(mine) for mine in shards))
    if any(bool(tensor.isnan().any()) for tensor in got[rank]):
        if total == 0:
            return "zero_norm", "gradients of zero became nan: 0/0. Divide by the norm only when it is too large."
        return "not_a_number", f"rank {rank}'s shards hold nan after clipping."
    if _all_by(shards, got, lambda r, p: 1.0):
        return "not_scaled", "the shards are as they were: scale them in place, with mul_() or *=."
    if total <= max_norm:
        if _all_by(shards, got, lambda r, p: max_norm / total):
            return "scaled_up", (
                f"the norm {total:.4g} is below max_norm, and the shards were scaled up to it: the factor is at most 1."
            )
        return "changed_below", "the norm is below max_norm: the shards stay exactly as they are."
    for factor, cause, sentence in _known_factors(shards, max_norm, total):
        if _all_by(shards, got, factor):
            return cause, sentence
    one = [p for p in range(len(shards[rank])) if _by(got[rank][p], shards[rank][p], 1.0)]
    if one and len(one) < len(shards[rank]):
        return "some_left", f"rank {rank} left some of its shards as they were: one factor for all of them."
    return "wrong_factor", f"rank {rank}'s shards are not max_norm over the norm times what they were."


def _known_factors(shards: Shards, max_norm: float, total: float) -> list[tuple[Any, str, str]]:
    """(factor of rank and shard, cause, sentence) of factors that one mistake gives."""
    own = [math.sqrt(squares(mine)) for mine in shards]
    local = "each rank scales by its own norm, so parts of one gradient shrink differently: one factor for all ranks."
    return [
        (lambda r, p: min(1.0, max_norm / own[r]), "local_factor", local),
        (lambda r, p: max_norm / own[r], "local_factor", local),
        (
            lambda r, p: min(1.0, max_norm / math.sqrt(squares([shards[r][p]]))),
            "each_tensor",
            "every tensor was clipped by a norm of its own: all tensors of all ranks share one.",
        ),
        (lambda r, p: (max_norm / total) ** 2, "scaled_twice", "the shards were scaled twice by the factor."),
        (lambda r, p: 1 / total, "to_norm_one", "the shards were scaled to the norm 1: due is max_norm."),
        (
            lambda r, p: max_norm / total**2,
            "squared_factor",
            "the factor was taken from the sum of squares: max_norm over the norm is due.",
        ),
    ]


def _all_by(shards: Shards, got: Shards, factor: Any) -> bool:
    """Whether every shard of every rank is `factor(rank, place)` times what it was."""
    pairs = [(r, p) for r, mine in enumerate(shards) for p in range(len(mine))]
    return all(_by(got[r][p], shards[r][p], factor(r, p)) for r, p in pairs)


def _by(got: Any, tensor: Any, factor: float) -> bool:
    return scaled(got, tensor, factor) if got.dtype == tensor.dtype and got.shape == tensor.shape else False
