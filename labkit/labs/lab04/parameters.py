"""Judge of exercise 4.3, `ZeroParameters`: parameters are cut among the ranks too (ZeRO stage 3).

Values: losses, and parameters as forward has them, equal serial AdamW's after every step. Evidence, from the record:
between steps a rank holds its part of parameters and state; at the end of forward no parameter is whole any more; in
forward and in backward a few are, and never all; what backward uses was gathered again; a step of k backwards sends
3kΨ (N-1)/N elements, and less where backward has no need of a parameter. Left out: modules that share a parameter, and
those that only some ranks use.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import labkit.labs.lab04.attempted as attempted
import labkit.labs.lab04.evidence as how
import labkit.labs.lab04.models as models
import labkit.labs.lab04.parameters_held as held
import labkit.labs.lab04.training as training
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab04.models import Case

NAME = "ZeroParameters"
_ABSENT = "it works while every backward uses every layer. Here one uses some of them, and the next others."
# What torch says of a parameter that was freed and is used all the same.
_FREED = ("storage of size 0", "not allocated yet", "out of bounds for storage")


def judge(cls: Callable, seed: int) -> Verdict:
    """A small model with everything, then bf16, then a larger one; then how it came about."""
    tried = cases(random.Random(seed))
    found, seen = attempted.on_all(lambda case: observe(cls, case), NAME, tried, seed, _ABSENT, _freed)
    if found is not None:
        return found
    large = seen[-1]
    found = how.steps_recorded(*large) or held.between(*large) or held.forward(*large) or held.backward(*large)
    found = found or held.again(*large)
    for question in (how.steps_recorded, _traffic, held.between, how.waited, _honest):
        for case, observed in reversed(seen):
            found = found or question(case, observed)
    return found or right(held.figures(*large))


def cases(rng: random.Random) -> list[Case]:
    """On 3, 2 and 4 ranks."""
    # So many frozen layers weigh more than what a rank may keep beside its parts between steps.
    order = (2, 0, 3, 1, *rng.sample(range(4, 16), 12))
    small = models.odd_plan(rng, 3, widths=(15, 19), depth=16, order=order, frozen=12, branches=2)
    narrow = models.odd_plan(rng, 2, dtype="bfloat16", depth=3)
    large = models.Plan(rng.randint(4, 7), 2 * rng.randint(30, 32) + 1, 3, depth=10)
    what = "frozen layers, layers used in another order, branches that not every backward uses"
    return [
        models.draw(rng, what, small, (1, 2), 3, alike=True),
        models.draw(rng, "a deep model", narrow, (1, 1, 1), 2),
        models.draw(rng, "a larger model", large, (1,), 4),
    ]


def observe(cls: Callable, case: Case) -> Observed:
    """Train by `cls` on ranks, under watch."""
    rank_args = [(*each, True) for each in case.rank_args]
    return evidence.observe(training.train, case.world_size, args=(cls,), rank_args=rank_args, deadline_s=120.0)


def _freed(found: Verdict | None) -> Verdict | None:
    if found is None or not any(words in found.sentence for words in _FREED):
        return found
    sentence = "a freed parameter is used: gather before a module's forward, and again before its backward."
    return wrong("attempted", "not_gathered_again", f"{sentence} {found.sentence}", found.tried, found.got)


def _traffic(case: Case, observed: Observed) -> Verdict | None:
    return held.traffic(case, observed)


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)
