"""What a wrong gradient or loss tells in exercise 2.3: which known mistake would give these numbers.

Works on the results alone, in the parent. A gradient is compared as one long vector: first whether it is the right one
times some factor, then whether it points where a known mistake would. Left out: how it came about
(`accumulate_seen`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """What one microbatch adds: counted tokens, all positions, the sum of losses, its gradient by name, FLOPs."""

    counted: int
    positions: int
    loss: float
    gradient: dict[str, Any]
    flops: int


Parts = Sequence[Sequence[Part]]  # per rank, its microbatches


def counted(parts: Parts) -> int:
    """Tokens that count, over all ranks."""
    return sum(part.counted for mine in parts for part in mine)


def mean_loss(parts: Parts) -> float:
    """Mean loss of all counted tokens, in nats."""
    return sum(part.loss for mine in parts for part in mine) / counted(parts)


def mean_gradient(parts: Parts) -> dict[str, Any]:
    """Gradient of the mean loss of all counted tokens, by name, in float64."""
    everything = [part for mine in parts for part in mine]
    return {
        name: sum(part.gradient[name] for part in everything) / counted(parts) for name in everything[0].gradient
    }


def near(got: float, expected: float, tolerance: float) -> bool:
    return math.isclose(got, expected, rel_tol=tolerance)


def apart(got: Any, due: Any, tolerance: float) -> tuple[str, str] | None:
    """Where a gradient is off by more than `tolerance` of the largest element due: (got, expected) in words."""
    off = (got.double() - due).abs()
    bad = ~(off <= tolerance * due.abs().max())  # also nan
    if not bad.any():
        return None
    at = tuple(int(i) for i in bad.nonzero()[0])
    return f"{float(got[at]):.6g} at {list(at)}", f"{float(due[at]):.6g}"


def wrong_gradient(parts: Parts, grads: Sequence[dict[str, Any]], rank: int) -> tuple[str, str]:
    """(cause, sentence) for the gradients that ranks hold, of which that of `rank` is wrong."""
    import torch

    vectors = [torch.cat([grad.double().flatten() for grad in each.values()]) for each in grads]
    got = vectors[rank]
    if not got.isfinite().all():
        return _not_finite(parts)
    if not got.any():
        return "no_gradient_left", f"the gradient on rank {rank} is zero everywhere: it was cleared, or never made."
    due = _flat(mean_gradient(parts))
    if _along(got, due):
        return _factor(parts, rank, float(got @ due / (due @ due)))
    for cause, vector in _mistakes(parts, rank):
        if vector.any() and _along(got, vector):
            return cause, _SENTENCES[cause].format(rank=rank)
    if float((got - due).norm() / due.norm()) < 0.02:
        return "nearly_right", "the gradient is nearly right: was something added to it, or a narrower dtype used?"
    some = [float(vector @ due) > 0.999 * float(vector.norm() * due.norm()) for vector in vectors]
    if any(some):
        return "ranks_differ", f"rank {rank} does not have the gradient that others have."
    return "wrong_gradient", "this is no gradient of a mean over tokens: what is summed, and what is it divided by?"


def wrong_loss(parts: Parts, out: float, rank: int) -> tuple[str, str]:
    """(cause, sentence) for a loss that is not the mean over all counted tokens."""
    if not math.isfinite(out):
        return _not_finite(parts)
    for cause, value in _losses(parts, rank):
        if near(out, value, 1e-4):
            return cause, _LOSSES[cause]
    return "wrong_loss", "it is the sum of all counted tokens' losses over their number, on all ranks."


def _not_finite(parts: Parts) -> tuple[str, str]:
    if any(part.counted == 0 for mine in parts for part in mine):
        return "empty_microbatch", "a microbatch without a counted token has no mean, 0 / 0 is nan: add up sums."
    if any(not mine for mine in parts):
        return "no_microbatch", "a rank without microbatches has no mean, 0 / 0 is nan: add up sums."
    return "not_finite", "there is nan or infinity in it."


def _flat(gradient: dict[str, Any]) -> Any:
    import torch

    return torch.cat([each.flatten() for each in gradient.values()])


def _along(got: Any, vector: Any) -> bool:
    """Whether one vector is a positive multiple of the other, to a thousandth."""
    return float(got @ vector) > 0 and 1 - float(got @ vector / (got.norm() * vector.norm())) < 5e-7


def _factor(parts: Parts, rank: int, ratio: float) -> tuple[str, str]:
    """The direction is right, the length is `ratio` times what it should be."""
    n, total = len(parts), counted(parts)
    own = sum(part.counted for part in parts[rank])
    positions = sum(part.positions for mine in parts for part in mine)
    factors = {
        "divided_by_world_size": (1 / n,),
        "summed": (total, total / n),
        "times_world_size": (n,) if n > 2 else (),
        "local_tokens": (total / own, total / own / n) if own else (),
        "ignored_counted": (total / positions, total / positions / n),
        "twice": (2.0,),  # on two ranks also what is summed over them once more
    }
    for cause, known in factors.items():
        if any(near(ratio, factor, 1e-3) and not near(factor, 1.0, 1e-3) for factor in known):
            return cause, _SENTENCES[cause].format(rank=rank)
    return "wrong_factor", f"the gradient points where it should, but is {ratio:.4g} times as long."


def _mistakes(parts: Parts, rank: int) -> Iterator[tuple[str, Any]]:
    """Directions that known mistakes give; those of one rank alone last."""

    def add(pairs: Any) -> Any:
        return sum(weight * _flat(part.gradient) for weight, part in pairs)

    def one(part: Part) -> float:
        return 1 / part.counted if part.counted else 0.0

    here = [mine for mine in parts if mine]
    everything = [part for mine in parts for part in mine]
    tokens = {id(mine): sum(part.counted for part in mine) for mine in here}
    yield "mean_of_means", add((one(p), p) for p in everything)
    yield "mean_of_means", add((one(p) / len(mine), p) for mine in here for p in mine)
    yield "mean_over_ranks", add((1 / tokens[id(mine)], p) for mine in here for p in mine if tokens[id(mine)])
    yield "ignored_counted", add((one(p) * p.positions, p) for p in everything)
    for weigh in (lambda p: 1.0, one):
        yield "last_microbatch", add((weigh(mine[-1]), mine[-1]) for mine in here)
        yield "first_microbatch", add((weigh(mine[0]), mine[0]) for mine in here)
        yield "reduced_again", add((weigh(p) * len(parts) ** -i, p) for mine in here for i, p in enumerate(mine))
        if parts[rank]:
            yield "not_reduced", add((weigh(p), p) for p in parts[rank])
            yield "not_reduced", _flat(parts[rank][-1].gradient)


def _losses(parts: Parts, rank: int) -> Iterator[tuple[str, float]]:
    own, here = parts[rank], [mine for mine in parts if mine]
    everything = [part for mine in parts for part in mine]
    total, summed = counted(parts), sum(part.loss for part in everything)
    own_sum, own_count = sum(part.loss for part in own), sum(part.counted for part in own)

    def mean(part: Part) -> float:
        return part.loss / part.counted if part.counted else 0.0

    def per_rank(mine: Sequence[Part]) -> float:
        tokens = sum(part.counted for part in mine)
        return sum(part.loss for part in mine) / tokens if tokens else 0.0

    yield "summed_loss", summed
    yield "loss_divided_again", summed / total / len(parts)
    yield "ignored_counted", summed / sum(part.positions for part in everything)
    yield "loss_times_world_size", summed / total * len(parts)
    for count in (len(parts), len(here)):
        yield "loss_of_means", sum(per_rank(mine) for mine in here) / count
        yield "loss_of_means", sum(sum(map(mean, mine)) / len(mine) for mine in here) / count
    yield "loss_of_means", sum(map(mean, everything)) / len(everything)
    if own_count:
        yield "local_loss", own_sum / own_count
        yield "local_loss", sum(map(mean, own)) / len(own)
    yield "local_loss", own_sum
    yield "local_loss", own_sum / total
    if own:
        yield "last_loss", mean(own[-1])
        yield "last_loss", own[-1].loss


_SENTENCES = {
    "divided_by_world_size": "it was divided by the tokens of all ranks, and then by world_size too: once is enough.",
    "summed": "this is the gradient of the sum: divide it by the number of counted tokens.",
    "times_world_size": "it is world_size times too long: was it summed over ranks more often than once?",
    "local_tokens": "the sum over ranks was divided by rank {rank}'s own tokens: add up the counts over ranks too.",
    "ignored_counted": "targets of -100 were counted as tokens: they add no loss, and count for nothing.",
    "twice": "it is twice as long: was it added to one that was already there, or summed over the two ranks again?",
    "mean_of_means": "this is a mean of microbatch means: one with few tokens weighs as much as one with many.",
    "mean_over_ranks": "each rank's mean is right, but ranks weigh alike: one with few tokens counts as one with many.",
    "last_microbatch": "only the last microbatch is in it: were gradients cleared, or is backward after the loop?",
    "first_microbatch": "only the first microbatch is in it.",
    "reduced_again": ".grad was summed over ranks after every microbatch, and so the earlier ones again each time.",
    "not_reduced": "rank {rank} has the gradient of its own microbatches only, without those of other ranks.",
}

_LOSSES = {
    "summed_loss": "it is the sum over tokens, not divided by their number.",
    "loss_divided_again": "it is divided by the tokens of all ranks, and by world_size too.",
    "ignored_counted": "targets of -100 were counted as tokens.",
    "loss_times_world_size": "it is world_size times too large.",
    "loss_of_means": "it is a mean of means, in which few tokens weigh as much as many.",
    "local_loss": "it is of this rank's own tokens: sum losses and counts over ranks too.",
    "last_loss": "it is of the last microbatch only.",
}
