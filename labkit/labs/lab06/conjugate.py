"""Judges of exercises 6.2 and 6.2b: `f` and `g`, the conjugate operators around a parallel region.

f is the identity forward and an all_reduce backward, g the reverse (Megatron-LM, arXiv:1909.08053, section 3).
Every rank's input, gradient and group differ here, so that a sum shows where there should be none. Left out: regions
(6.3), and second derivatives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.functions as functions
import labkit.labs.lab06.seen as seen
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.labs.lab06.functions import Case, Task, in_groups, largest_in_groups
from labkit.labs.lab06.modules import one_all_reduce
from labkit.labs.lab06.told import MAX, Due, Mistake, close

_WORLD = "the sum goes over all ranks of the world: give all_reduce group=group."


def judge_f(fn: Callable, seed: int) -> Verdict:
    """Four ranks, then two groups of two; tensors of several shapes, gradients dense and expanded."""
    found, _ = functions.judged(fn, f_task(), _cases(random.Random(seed)))
    return found or right("x passes as it is; its gradient is summed by one all_reduce in backward")


def judge_g(fn: Callable, seed: int) -> Verdict:
    """As `judge_f`."""
    found, _ = functions.judged(fn, g_task(), _cases(random.Random(seed)))
    return found or right("parts are summed by one all_reduce in forward; the gradient passes as it is")


def _cases(rng: random.Random) -> list[Case]:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))

    def asks(world: int) -> tuple:
        shapes = ((rng.randint(2, 3), rng.randint(3, 5), 8), (rng.randint(5, 9), 6))
        dense = tuple(
            ((torch.randn(shapes[0], generator=generator),), torch.randn(shapes[0], generator=generator))
            for _ in range(world)
        )
        expanded = tuple(((torch.randn(shapes[1], generator=generator),), rng.uniform(0.5, 3.0)) for _ in range(world))
        return dense, expanded

    return [Case("a gradient for each element, then sum().backward()", 4, t, asks(4)) for t in (4, 2)]


def _gradients(case: Case, number: int) -> list[Any]:
    import torch

    found = []
    for (x,), gradient in case.asks[number]:
        found.append(gradient if isinstance(gradient, torch.Tensor) else torch.full_like(x, gradient))
    return found


def _of_f(case: Case, number: int) -> Due:
    xs, gradients, t = case.inputs(number), _gradients(case, number), case.t
    sums = in_groups(gradients, t)
    times = "the gradient is multiplied by t,"
    both = "forward sums x over ranks: f leaves it as it is, for every rank has the same x already."
    return Due(
        {"output": xs, "input gradient": sums},
        {
            "output": [
                Mistake("forward_summed", both, in_groups(xs, t)),
                Mistake("forward_summed", both, [x / t for x in in_groups(xs, t)]),
            ],
            "input gradient": [
                Mistake("not_summed", "the gradient is this rank's own part: backward all_reduces it.", gradients),
                Mistake("averaged", "parts of the gradient are averaged: they add up.", [s / t for s in sums]),
                Mistake("max_for_sum", MAX, largest_in_groups(gradients, t)),
                Mistake("wrong_group", _WORLD, in_groups(gradients, case.world)),
                Mistake("times_t", f"{times} and its parts differ: all_reduce them.", [t * each for each in gradients]),
                Mistake("summed_twice", "the gradient is summed twice: one all_reduce will do.", [s * t for s in sums]),
            ],
        },
        {"input gradient": ("no_gradient", "rank {rank}'s x has no gradient: backward gives one back, the sum.")},
    )


def _of_g(case: Case, number: int) -> Due:
    xs, gradients, t = case.inputs(number), _gradients(case, number), case.t
    sums = in_groups(xs, t)
    times = "the gradient is multiplied by t:"
    both = "backward sums the gradient over ranks: it is that of the sum, so every rank has the same one already."
    whole = "the gradient is divided by t: a sum passes it on whole."
    cut_out = "the sum has cut rank {rank}'s part out of the graph: backward cannot reach x."
    back = in_groups(gradients, t)
    return Due(
        {"output": sums, "input gradient": gradients},
        {
            "output": [
                Mistake("not_summed", "the output is this rank's own part: forward all_reduces it.", xs),
                Mistake("averaged", "parts of a sum are averaged: they add up.", [s / t for s in sums]),
                Mistake("max_for_sum", MAX, largest_in_groups(xs, t)),
                Mistake("wrong_group", _WORLD, in_groups(xs, case.world)),
            ],
            "input gradient": [
                Mistake("gradient_summed", both, back),
                Mistake("gradient_averaged", f"{both} Averaging changes it, too.", [s / t for s in back]),
                Mistake("gradient_divided", whole, [s / t for s in gradients]),
                Mistake("gradient_times_t", f"{times} a sum passes it on as it is.", [t * s for s in gradients]),
            ],
        },
        {"input gradient": ("no_gradient", cut_out)},
    )


def _swapped(summed: Callable[[Case, int], Due], it_is: str) -> Callable[[Case, int, list], tuple[str, str] | None]:
    """Whether what came back is what the other of the two would give."""

    def first(case: Case, number: int, got: list) -> tuple[str, str] | None:
        other = summed(case, number).values
        if all(close(each[name], other[name][rank]) for rank, each in enumerate(got) for name in other):
            return "swapped", it_is
        return None

    return first


def _calls(due: tuple[int, int]) -> Callable[[Case, int, int, Any, seen.Part], Verdict | None]:
    """Exactly one all_reduce of x's bytes, in the direction that is due."""

    def record(case: Case, number: int, rank: int, of_rank: Any, part: seen.Part) -> Verdict | None:
        forward = seen.between(of_rank, part.begin, part.middle)
        backward = seen.between(of_rank, part.middle, part.end)
        found = one_all_reduce(forward, backward, due, case.inputs(number)[rank].nbytes)
        if found is None:
            return None
        got = f"rank {rank}: forward {seen.words(forward)}; backward {seen.words(backward)}"
        return wrong("evidence", found[0], found[1], case.tried, got, found[2])

    return record


def _failed(case: Case, observed: Observed, failed: Verdict) -> tuple[str, str] | None:
    if "ontiguous" in failed.sentence or failed.cause == "died":  # gloo aborts on a tensor that overlaps itself
        return "not_contiguous", (
            "a gradient need not lie in one piece (after sum() it is one number, expanded): all_reduce a dense copy."
        )
    return None


def f_task() -> Task:
    """What 6.2 demands."""
    return Task("f", "x, group", _of_f, _calls((0, 1)), _swapped(_of_g, "this is g: f sums in backward."), _failed)


def g_task() -> Task:
    """What 6.2b demands."""
    return Task("g", "x, group", _of_g, _calls((1, 0)), _swapped(_of_f, "this is f: g sums in forward."), _failed)
