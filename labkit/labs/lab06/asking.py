"""The order in which lab 06's judges ask: of each case what came out, then of all of them how it came about.

Left out: the questions, which are those of functions (`functions`) and of classes (`modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import labkit.labs.lab06.seen as seen
import labkit.labs.lab06.told as told
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict
from labkit.check.honesty import honest

Question = Callable[[Any, Any, Observed], Verdict | None]  # of a task, one of its cases, and what was seen of it


def in_turn(
    task: Any,
    cases: Sequence[Any],
    observe: Callable[[Any], Observed],
    results: Sequence[Question],
    then: Sequence[Question],
) -> tuple[Verdict | None, list[Observed]]:
    """(the first failure or None, what was seen of each case). observe: leads the answer through a case.

    results: asked as soon as a case has run. then: asked of all cases, once all have. A value that is wrong because it
    was used before it had come is told as that.
    """
    all_seen = []
    for case in cases:
        observed = observe(case)
        found = _first(task, [case], [observed], (told.ran, *results))
        if found is not None:
            raced = found.stage == "values" and seen.waited(observed, case.tried, "values")
            return raced or found, all_seen
        all_seen.append(observed)
    return _first(task, cases, all_seen, then), all_seen


def waited(task: Any, case: Any, observed: Observed) -> Verdict | None:
    """Whether everything was waited for."""
    return seen.waited(observed, case.tried)


def honestly(task: Any, case: Any, observed: Observed) -> Verdict | None:
    """Whether the record can be believed."""
    return honest(observed, case.tried)


def _first(
    task: Any, cases: Sequence[Any], all_seen: Sequence[Observed], questions: Sequence[Question]
) -> Verdict | None:
    for question in questions:
        for case, observed in zip(cases, all_seen, strict=True):
            found = question(task, case, observed)
            if found is not None:
                return found
    return None
