"""Judge of exercise 4.1, `ZeroOptimizer`: the optimizer's state is cut among the ranks (ZeRO stage 1).

Values: parameters equal serial AdamW's after every step, on 2, 3 and 4 ranks, in fp32 and in bf16 with fp32 copies,
with a frozen layer and gradients that not every rank has. Evidence, from the record: between steps a rank holds
8Ψ/N bytes of state (12Ψ/N in bf16), and in a step it sends 2Ψ (N-1)/N elements. Left out: learning rates that change.
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
from labkit.check.exercise import Verdict, right
from labkit.check.honesty import honest
from labkit.labs.lab04.models import Case

NAME = "ZeroOptimizer"
_ABSENT = "it works while every parameter has a gradient. One that a rank's batch did not use has None: it counts as 0."


def judge(cls: Callable, seed: int) -> Verdict:
    """A small model with everything, then bf16, then a larger one; then how it came about."""
    tried = cases(random.Random(seed))
    found, seen = attempted.on_all(lambda case: observe(cls, case), NAME, tried, seed, _ABSENT)
    if found is not None:
        return found
    for question in (how.steps_recorded, how.state_is_sharded, _traffic, how.waited, _honest):
        for case, observed in reversed(seen):
            found = question(case, observed)
            if found is not None:
                return found
    return right(figures(*seen[-1]))


def cases(rng: random.Random) -> list[Case]:
    """On 3, 2 and 4 ranks."""
    small = models.odd_plan(rng, 3, frozen=1, branches=3)
    narrow = models.odd_plan(rng, 2, dtype="bfloat16", depth=8)
    large = models.Plan(rng.randint(4, 7), 2 * rng.randint(26, 28) + 1, 3, depth=12)
    return [
        models.draw(rng, "a frozen layer, branches that not every batch uses", small, (1, 2, 1), 3),
        models.draw(rng, "a deep model", narrow, (1, 1, 1), 2),
        models.draw(rng, "a larger model", large, (1, 1), 4),
    ]


def observe(cls: Callable, case: Case) -> Observed:
    """Train by `cls` on ranks, under watch."""
    return evidence.observe(training.train, case.world_size, args=(cls,), rank_args=case.rank_args, deadline_s=120.0)


def _traffic(case: Case, observed: Observed) -> Verdict | None:
    return how.traffic(case, observed, (2,) * case.steps, "2Ψ")


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)


def figures(case: Case, observed: Observed) -> str:
    """What was measured, for a pass."""
    sizes, each = how.sizes_of(case), how.state_bytes_per_element(case)
    held = max(by_step[-1] for by_step in how.held_between(case, observed))
    _, steps = training.cuts(observed.records[0], case.micro)
    sent = how.elements_sent(how.carriers(observed.records[0], steps[-1].begin, steps[-1].cleared))
    return (
        f"of {sizes.total} parameters each of {sizes.world_size} ranks holds {held} bytes of state "
        f"({each}Ψ/N is {each * sizes.total / sizes.world_size:.0f}) and sends {sent:.0f} elements a step, "
        f"{sent / sizes.total:.2f}Ψ"
    )
