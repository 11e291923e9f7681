"""Judge of exercise 7.2, `gpipe`: all forwards through the pipeline, then all backwards.

Values: the mean loss on the last rank, gradients equal serial. Evidence: each stage's FLOPs once, no forward after a
backward, messages of one hidden state each, idle share (p-1)/(m+p-1) when the record is replayed on a free link. Left
out: in which order the backwards come.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import labkit.labs.lab07.steps as steps
import labkit.labs.lab07.told as told
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab07.steps import Case

NAME = "gpipe"


def judge(fn: Callable, seed: int) -> Verdict:
    """Two ranks, then three."""
    rng, seen = random.Random(seed), []
    for ranks, microbatches in ((2, rng.randint(3, 5)), (3, rng.randint(4, 6))):
        case = steps.draw(rng, NAME, ranks, microbatches)
        observed = steps.observe(fn, case)
        found = told.ran(case, observed, NAME) or told.values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for question in (told.work, told.waited, told.one_at_a_time, forwards_first, told.idle, _honest):
        for case, observed in seen:
            found = question(case, observed)
            if found is not None:
                return found
    case, observed = seen[-1]
    share = steps.idle_share(steps.replayed(observed))
    return right(
        f"gradients equal serial; {case.ranks} equal stages idle {share:.1%} of the time with {case.microbatches} "
        f"microbatches, theory {told.theory(case):.1%}; every rank keeps {case.microbatches} in flight"
    )


def forwards_first(case: Case, observed: Observed) -> Verdict | None:
    """Cause "not_gpipe": a rank begins a backward before its last forward."""
    for rank, result in enumerate(observed.results):
        notes = result[2]
        if "F" in "".join(notes[case.microbatches :]):
            sentence = f"rank {rank} runs a backward before its last forward: GPipe does all forwards first."
            return wrong("evidence", "not_gpipe", sentence, case.tried, " ".join(notes), "F ... F B ... B")
    return None


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)
