"""What wrong gradients tell: which known mistake of averaging would give these numbers.

Used by the judges of 2.1 and 2.2. Works on gradients alone, in the parent: a rank's own ones, what each rank held in
the end, and the mean that was due. Left out: what was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.ranks import words

Grads = dict[str, Any]  # name -> tensor, or None
# Of the largest element of a gradient, by dtype: what adding in another order may change.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True)
class Averaged:
    """Gradients of one step. own: by rank, before averaging. got: by rank, afterwards. mean: what is due."""

    own: Sequence[Grads]
    got: Sequence[Grads]
    mean: Grads

    @property
    def world_size(self) -> int:
        return len(self.own)

    @property
    def wrong(self) -> list[tuple[int, str]]:
        """(rank, name) of every gradient that is not the mean."""
        every = [(rank, name) for rank in range(self.world_size) for name in self.mean]
        return [(rank, name) for rank, name in every if not close(self.got[rank][name], self.mean[name])]

    def all(self, due: Any) -> bool:
        """Whether every gradient of every rank is `due(rank, name)`, where that is not None."""
        pairs = [(got[name], due(rank, name)) for rank, got in enumerate(self.got) for name in self.mean]
        return all(close(got, wanted) for got, wanted in pairs if wanted is not None)

    def is_own(self, rank: int, name: str) -> bool:
        """Whether this gradient is as backward left it."""
        return close(self.got[rank][name], self.own[rank][name], absent=False)


def close(got: Any, due: Any, absent: bool = True) -> bool:
    """Whether a gradient is `due`, but for rounding. absent: None and zeros are the same where None is due."""
    if due is None or got is None:
        return got is due or (absent and due is None and not got.any())
    from labkit.check.compare import difference

    return difference(got, due, atol=_tolerance(due)) is None


def wrong_gradients(averaged: Averaged) -> tuple[str, str] | None:
    """(cause, sentence) for the known mistake that would give these gradients; None where none would."""
    found = _of_each_rank(averaged) or _by_a_factor(averaged) or _some_left(averaged)
    if found is None and all(_blurred(averaged, rank, name) for rank, name in averaged.wrong):
        found = "dtype_lost", "the values lost precision on the way: they were added or sent as another dtype."
    return found


def _of_each_rank(averaged: Averaged) -> tuple[str, str] | None:
    own, mean, n = averaged.own, averaged.mean, averaged.world_size
    if all(averaged.is_own(rank, name) for rank in range(n) for name in mean):
        return "still_own", "every rank still holds its own gradients in `.grad`: the mean did not get there."
    if averaged.all(lambda rank, name: own[0][name]):
        return "rank_zeros_gradient", "every rank has rank 0's gradient: that is a copy, and a mean is due."
    lack = sorted({rank for rank, _ in averaged.wrong})
    have = [rank for rank in range(n) if rank not in lack]
    if lack and have:
        sentence = f"{words.ranks(have)} {words.verb(have, 'has', 'have')} the mean and {words.ranks(lack)} "
        sentence += f"{words.verb(lack, 'has', 'have')} not: every rank needs it"
        if have == [0]:
            return "rank_zero_only", f"{sentence}, so all_reduce."
        return "some_ranks_only", f"{sentence}, by the same steps on all."
    if averaged.all(lambda rank, name: None if own[rank][name] is None else own[rank][name] / n):
        return "own_divided", f"every rank holds its own gradient divided by {n}: nothing was added."
    return None


def _by_a_factor(averaged: Averaged) -> tuple[str, str] | None:
    """All gradients are the mean times one number, or each the sum over the number of ranks that had one."""
    n, mean = averaged.world_size, averaged.mean
    factor = _factor(averaged)
    if factor is not None:
        by = n / factor
        if _near(factor, n):
            return "not_divided", f"this is the sum over {n} ranks, {n} times the mean: all_reduce adds and no more."
        if _near(factor, 1 / n):
            return "divided_twice", f"this is the mean divided by {n} once more: divide before or after, not both."
        if _near(by, n - 1):
            return "divided_by_others", f"the sum was divided by {n - 1}, and {n} ranks are in it, one's own too."
        if by < 100 and _near(by, round(by)):
            return "fixed_number", f"the sum over {n} ranks was divided by {by:.4g}: divide by the number of ranks."
        return "scaled", f"this is the mean times {factor:.4g}: what scales it beside the division by {n}?"
    present = {name: sum(grads[name] is not None for grads in averaged.own) for name in mean}
    counted = {name: each * (n / present[name]) for name, each in mean.items() if each is not None}
    if any(count < n for count in present.values()) and averaged.all(lambda rank, name: counted.get(name)):
        sentence = "a gradient was divided by how many ranks have one: one without counts as zero, so divide by all."
        return "counts_those_present", sentence
    return None


def _some_left(averaged: Averaged) -> tuple[str, str] | None:
    """Some gradients, or the last elements of some, are a rank's own still."""
    left = list(dict.fromkeys(name for _, name in averaged.wrong))
    good = len(averaged.mean) - len(left)
    if good and all(averaged.is_own(rank, name) for rank, name in averaged.wrong):
        are, still = "is" if good == 1 else "are", "gradient" if good == 1 else "gradients"
        return "some_left", f"{good} {still} {are} right and {len(left)} still a rank's own: {', '.join(left[:3])}."
    for rank, name in averaged.wrong:
        got, own, mean = averaged.got[rank][name], averaged.own[rank][name], averaged.mean[name]
        if got is None or own is None or mean is None:
            continue
        right = _element_wise(got, mean)
        if right.any() and not right.all() and _element_wise(got, own)[~right].all():
            return "remainder", f"some elements of {name} are the mean and {int((~right).sum())} a rank's own still."
    return None


def _factor(averaged: Averaged) -> float | None:
    """The one number that makes every gradient from its mean; None where there is none."""
    factor = None
    for got in averaged.got:
        for name, mean in averaged.mean.items():
            if mean is None or not mean.any():
                continue
            if got[name] is None or got[name].shape != mean.shape:
                return None
            if factor is None:
                at = mean.abs().flatten().argmax()
                factor = float(got[name].flatten()[at] / mean.flatten()[at])
            if not close(got[name], mean * factor):
                return None
    return factor if factor is not None and factor > 0 and not _near(factor, 1.0) else None


def _blurred(averaged: Averaged, rank: int, name: str) -> bool:
    """Whether this is the mean as a narrower dtype would have it: added, divided or sent in that dtype."""
    import torch

    got, mean = averaged.got[rank][name], averaged.mean[name]
    if got is None or mean is None or got.shape != mean.shape or not got.isfinite().all():
        return False
    off, most = float((got.double() - mean.double()).abs().max()), float(mean.double().abs().max())
    for narrow in (torch.float32, torch.float16, torch.bfloat16):
        if torch.finfo(narrow).eps <= torch.finfo(mean.dtype).eps or off > averaged.world_size * _loss(narrow, most):
            continue
        total = got * averaged.world_size
        if torch.equal(got, got.to(narrow).to(got.dtype)) or close(total, total.to(narrow).to(got.dtype)):
            return True
        parts = [grads[name] for grads in averaged.own if grads[name] is not None]
        if close(got, sum(part.to(narrow).to(got.dtype) for part in parts) / averaged.world_size):
            return True
    return False


def _loss(narrow: Any, most: float) -> float:
    """How far off one rounding to `narrow` may put a value of up to `most`."""
    import torch

    return 2 * torch.finfo(narrow).eps * most + torch.finfo(narrow).tiny


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * abs(other)


def _tolerance(due: Any) -> float:
    most = float(due.abs().max()) if due.numel() else 0.0
    return TOLERANCE.get(str(due.dtype).removeprefix("torch."), 0.0) * most


def _element_wise(got: Any, due: Any) -> Any:
    return (got.double() - due.double()).abs() <= _tolerance(due)
