"""The first half of the judges of 4.1-4.3: every case is run, and what it gives compared with serial training.

Where a special case does not run at all, plainer ones tell whether it is that which the answer stumbled over. Left out:
how the values came about.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import labkit.labs.lab04.evidence as how
import labkit.labs.lab04.models as models
import labkit.labs.lab04.told as told
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab04.models import Case
from labkit.labs.lab04.serial import serial

_FROZEN = "it works while every parameter trains. A frozen one (requires_grad False) has no gradient and takes no hook."
_ORDER = "it works while layers are used in the order in which they are registered. Here they are not: what comes when?"


def on_all(
    observe: Callable[[Case], Observed],
    name: str,
    cases: list[Case],
    seed: int,
    absent: str,
    worded: Callable[[Verdict], Verdict | None] = lambda found: found,
) -> tuple[Verdict | None, list[tuple[Case, Observed]]]:
    """(the first failure or None, the cases seen up to it). worded: given why an answer did not run."""
    seen: list[tuple[Case, Observed]] = []
    for case in cases:
        observed = observe(case)
        found = ran(observe, name, case, observed, seed, absent)
        if found is not None:
            return worded(found), seen
        found = told.values(case, observed, serial(case))
        if found is not None:
            return how.waited(case, observed) or found, seen
        seen.append((case, observed))
    return None, seen


def ran(
    observe: Callable[[Case], Observed], name: str, case: Case, observed: Observed, seed: int, absent: str = ""
) -> Verdict | None:
    """As `attempts.ran`; where plainer cases do not fail, "order", "frozen_parameter" or "no_gradient".

    observe: runs the answer on a case. absent: what to say where it is parameters without gradient.
    """
    found = attempts.ran(observed, name, case.tried)
    plan = case.plan
    if found is None or any(attempts.no_result(out) for out in observed.results):
        return found
    plain = replace(plan, frozen=0, branches=0, order=())
    ladder = [(plain, "", "")]
    ladder += [(replace(plain, order=plan.order), "order", _ORDER)] if plan.order else []
    ladder += [(replace(plan, branches=0), "frozen_parameter", _FROZEN)] if plan.frozen else []
    if plan == plain:
        return found
    for plainer, cause, sentence in ladder:
        again = models.draw(random.Random(seed), "a plainer model", plainer, (1,), case.world_size)
        failed = attempts.ran(observe(again), name, again.tried)
        if failed is not None:
            return _special(cause, sentence, failed) if cause else failed
    return _special("no_gradient", absent, found) if plan.branches else found


def _special(cause: str, sentence: str, found: Verdict) -> Verdict:
    return wrong("attempted", cause, f"{sentence} {found.sentence}", found.tried, found.got, found.expected)
