"""Judge of exercise 7.3, `one_f_one_b`: a backward as soon as there is one, and so few microbatches in flight.

Values and work as in 7.2. Evidence: rank r has at most min(m, p - r) microbatches in flight, and keeps no activations
of those that are done; the replay of the record,
with sends that wait for their receivers, comes to an end and idles (p-1)/(m+p-1). Left out: interleaved stages, which
7.5 is free to use.
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
from labkit.record.held import held

NAME = "one_f_one_b"


def judge(fn: Callable, seed: int) -> Verdict:
    """Fewer microbatches than ranks, then more."""
    rng, seen = random.Random(seed), []
    for ranks, microbatches in ((3, 2), (4, rng.randint(6, 8))):
        case = steps.draw(rng, NAME, ranks, microbatches)
        observed = steps.observe(fn, case)
        found = told.ran(case, observed, NAME) or told.values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for question in (told.work, told.waited, told.one_at_a_time, few_in_flight, let_go, told.idle, _honest):
        for case, observed in reversed(seen):
            found = question(case, observed)
            if found is not None:
                return found
    case, observed = seen[-1]
    most = [in_flight(result[2]) for result in observed.results]
    share = steps.idle_share(steps.replayed(observed))
    return right(
        f"gradients equal serial; ranks keep {', '.join(map(str, most))} of {case.microbatches} microbatches in "
        f"flight, and idle {share:.1%} of the time, theory {told.theory(case):.1%}; no sends wait for each other"
    )


def in_flight(notes: list[str]) -> int:
    """The most forwards whose backward had not begun."""
    count = most = 0
    for note in notes:
        count += 1 if note[0] == "F" else -1
        most = max(most, count)
    return most


def few_in_flight(case: Case, observed: Observed) -> Verdict | None:
    """Cause "in_flight": more than min(m, p - r) on rank r."""
    for rank, result in enumerate(observed.results):
        most, due = in_flight(result[2]), min(case.microbatches, case.ranks - rank)
        if most > due:
            sentence = (
                f"rank {rank} has {most} microbatches in flight, and {due} will do: after its first "
                f"{case.ranks - rank - 1} forwards a rank does one forward and one backward in turn."
            )
            if most == case.microbatches:
                sentence = (
                    f"rank {rank} does all {most} forwards before a backward, as GPipe does: begin a backward as soon "
                    f"as its gradient is there, and {due} are in flight."
                )
            got = f"rank {rank}: {' '.join(result[2])}"
            return wrong("evidence", "in_flight", sentence, case.tried, got, f"at most {due} in flight")
    return None


def let_go(case: Case, observed: Observed) -> Verdict | None:
    """Cause "kept": activations of microbatches whose backward is over. Room for two hidden states: a loss has some."""
    rows, width = case.shape
    for rank, record in enumerate(observed.records):
        due, most = min(case.microbatches, case.ranks - rank), max(held(record).by_kind["activation"], default=0)
        limit = (len(case.weights[rank]) * due + 2) * rows * width * 4
        if most > limit:
            sentence = (
                f"rank {rank} still keeps activations of microbatches whose backward is over: let backward free its "
                "graph, without retain_graph, and drop what was kept."
            )
            return wrong("evidence", "kept", sentence, case.tried, f"{most} bytes", f"at most {limit}")
    return None


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)
