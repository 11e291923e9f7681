"""Judge of exercise 4.2, `ZeroGradients`: gradients are cut among the ranks as well (ZeRO stage 2).

Values: parameters equal serial AdamW's after every step, several backwards before a step among them. Evidence, from
the record: the state as in 4.1; gradients are reduced while backward goes on; when it is over a rank holds its part of
them, and never all of them at once; a step of k backwards sends (k+1)Ψ (N-1)/N elements. Left out: parameters that
only some ranks use in a backward, for whose gradients ranks would have to agree on an order.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import labkit.labs.lab04.attempted as attempted
import labkit.labs.lab04.evidence as how
import labkit.labs.lab04.models as models
import labkit.labs.lab04.training as training
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab04.models import Case

NAME = "ZeroGradients"
# Gradients of the largest parameter that may be there at once, beside a rank's part of all. gloo's two threads hold
# what they have just sent a moment longer, which is up to 2 of them.
LARGEST = 6
_ABSENT = "it works while every backward gives every gradient. Here a backward uses some layers, and the next others."


def judge(cls: Callable, seed: int) -> Verdict:
    """A small model with everything, then bf16, then a larger one; then how it came about."""
    tried = cases(random.Random(seed))
    found, seen = attempted.on_all(lambda case: observe(cls, case), NAME, tried, seed, _ABSENT, _too_soon)
    if found is not None:
        return found
    large = seen[-1]
    found = how.steps_recorded(*large) or while_backward(*large) or _other_ways(*large)
    found = found or gradients_are_sharded(*large)
    for question in (how.steps_recorded, _traffic, _state, how.waited, _honest):
        for case, observed in reversed(seen):
            found = found or question(case, observed)
    return found or right(figures(*large))


def cases(rng: random.Random) -> list[Case]:
    """On 3, 2 and 4 ranks."""
    order = (2, 0, 3, 1)
    small = models.odd_plan(rng, 3, depth=4, order=order, frozen=1, branches=2)
    narrow = models.odd_plan(rng, 2, dtype="bfloat16", depth=5)
    large = models.Plan(rng.randint(4, 7), 2 * rng.randint(26, 28) + 1, 3, depth=12)
    what = "a frozen layer, layers used in another order, branches that not every backward uses"
    return [
        models.draw(rng, what, small, (1, 2), 3, alike=True),
        models.draw(rng, "a deep model", narrow, (1, 1, 1), 2),
        models.draw(rng, "a larger model", large, (2,), 4),
    ]


def observe(cls: Callable, case: Case) -> Observed:
    """Train by `cls` on ranks, under watch."""
    return evidence.observe(training.train, case.world_size, args=(cls,), rank_args=case.rank_args, deadline_s=120.0)


def _too_soon(found: Verdict) -> Verdict:
    """What failed, with a word on hooks that come before `.grad` is there."""
    if found.cause != "raised" or "'NoneType'" not in found.sentence:
        return found
    sentence = "`.grad` is still None: a hook of register_post_accumulate_grad_hook comes once a gradient is in it."
    return wrong("attempted", "hook_too_soon", f"{sentence} {found.sentence}", found.tried, found.got, found.expected)


def while_backward(case: Case, observed: Observed) -> Verdict | None:
    """Gradients are reduced within backward. Cause "after_backward"."""
    sizes = how.sizes_of(case)
    share = sizes.total * (sizes.world_size - 1) / sizes.world_size
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        for cut in steps:
            for begin, end in cut.backwards:
                sent = how.elements_sent(how.carriers(record, begin, end))
                if sent < 0.9 * share:
                    sentence = "gradients are reduced when backward is over: let a hook reduce each as it appears."
                    got = f"rank {rank}: {sent:.0f} elements sent in backward"
                    return wrong("evidence", "after_backward", sentence, case.tried, got, f"Ψ (N-1)/N = {share:.0f}")
    return None


def gradients_are_sharded(case: Case, observed: Observed) -> Verdict | None:
    """A rank's part of the gradients is all that it holds after backward, and little more while it goes on.

    Causes: "gradients_kept" (all of them are there after backward), "full_gradient" (in backward).
    """
    sizes = how.sizes_of(case)
    part, largest = 4 * sizes.shard, how.width_of(case) * max(sizes.elements)
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        for cut in steps:
            before = training.held_at(record, cut.begin)
            for begin, end in cut.backwards:
                held = training.held_at(record, end) - before
                due = f"4Ψ/N = {4 * sizes.total / sizes.world_size:.0f} bytes"
                if held > part + 2 * largest:
                    sentence = f"rank {rank} holds more than its part of the gradients after backward: free `.grad`."
                    got = f"{held} bytes more than before forward"
                    return wrong("evidence", "gradients_kept", sentence, case.tried, got, due)
                peak = training.peak_in(record, begin, end) - training.held_at(record, begin)
                if peak > part + LARGEST * largest:
                    sentence = f"rank {rank} holds gradients of many parameters at once in backward: reduce, then free."
                    got = f"{peak} bytes more than before backward"
                    due = f"at most its part and {LARGEST} of the largest, {part + LARGEST * largest}"
                    return wrong("evidence", "full_gradient", sentence, case.tried, got, due)
    return None


def _other_ways(case: Case, observed: Observed) -> Verdict | None:
    """Where another collective does the work, that says more than what it holds meanwhile."""
    found = _traffic(case, observed)
    return found if found is not None and found.cause in ("all_reduce", "all_gather_gradients") else None


def _traffic(case: Case, observed: Observed) -> Verdict | None:
    terms = tuple(count + 1 for count in case.micro)
    return how.traffic(case, observed, terms, "(k+1)Ψ" if max(case.micro) > 1 else "2Ψ")


def _state(case: Case, observed: Observed) -> Verdict | None:
    """Zeroed parts of gradients may stay, and a buffer for one."""
    sizes = how.sizes_of(case)
    spare = 4 * sizes.shard + 2 * how.width_of(case) * max(sizes.elements)
    return how.state_is_sharded(case, observed, spare)


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)


def figures(case: Case, observed: Observed) -> str:
    """What was measured, for a pass."""
    sizes, record = how.sizes_of(case), observed.records[0]
    _, steps = training.cuts(record, case.micro)
    cut = steps[-1]
    held = training.held_at(record, cut.backwards[-1][1]) - training.held_at(record, cut.begin)
    peak = max(training.peak_in(record, *each) - training.held_at(record, each[0]) for each in cut.backwards)
    sent = how.elements_sent(how.carriers(record, cut.begin, cut.cleared))
    return (
        f"of {sizes.total} gradients each of {sizes.world_size} ranks holds {held} bytes after backward (4Ψ/N is "
        f"{4 * sizes.total / sizes.world_size:.0f}) and at most {peak} more in it (all: {4 * sizes.total}); a step of "
        f"{case.micro[-1]} backwards sends {sent / sizes.total:.2f}Ψ elements"
    )
