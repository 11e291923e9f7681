"""The judge that the functions of lab 06 share: output and gradients on every rank, then how they came about.

An exercise's module says what is due and which mistakes it knows, as a `Task`. Left out: classes (`modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab06.asking as asking
import labkit.labs.lab06.in_rank as in_rank
import labkit.labs.lab06.seen as seen
import labkit.labs.lab06.told as told
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong


@dataclass(frozen=True)
class Case:
    """One launch. asks: per call, per rank (inputs, output's gradient; a number stands for a tensor full of it)."""

    what: str
    world: int
    t: int
    asks: tuple[tuple[tuple[tuple, Any], ...], ...]

    @property
    def tried(self) -> str:
        return f"{told.groups(self.world, self.t)}, {self.what}"

    def inputs(self, number: int, position: int = 0) -> list[Any]:
        """One of the inputs of a call, by rank."""
        return [inputs[position] for inputs, _ in self.asks[number]]


@dataclass(frozen=True)
class Task:
    """What one exercise demands. names: its arguments, in words. calls: (case, number) -> Due of one call.

    record: (case, number, rank, record, where the call is in it) -> a failing Verdict or None.
    first: (case, number, results by rank) -> what is asked before single values, (cause, sentence) or None.
    failed: (case, observed, failing verdict) -> (cause, sentence) of a run that failed, or None. trained: how many
    inputs have a gradient.
    """

    name: str
    names: str
    calls: Callable[[Case, int], told.Due]
    record: Callable[[Case, int, int, Any, seen.Part], Verdict | None]
    first: Callable[[Case, int, list], tuple[str, str] | None] = lambda case, number, got: None
    failed: Callable[[Case, Observed, Verdict], tuple[str, str] | None] = lambda case, observed, failed: None
    trained: int = 1


def judged(fn: Callable, task: Task, cases: Sequence[Case]) -> tuple[Verdict | None, list[Observed]]:
    """(the first failure or None, what was seen of each case)."""
    then = (_recorded, asking.waited, _record, asking.honestly)
    return asking.in_turn(task, cases, lambda case: observe(fn, task, case), (_values,), then)


def observe(fn: Callable, task: Task, case: Case) -> Observed:
    """Lead an answer through the case's calls on ranks, under watch."""
    rank_args = [
        (fn, task.names, case.t, [ask[rank] for ask in case.asks], task.trained) for rank in range(case.world)
    ]
    return evidence.observe(in_rank.function_calls, case.world, rank_args=rank_args, deadline_s=60.0)


def _values(task: Task, case: Case, observed: Observed) -> Verdict | None:
    for number in range(len(case.asks)):
        got = [result["asks"][number] for result in observed.results]
        first = task.first(case, number, got)
        if first is not None:
            return wrong("values", *first, case.tried)
        found = told.values(got, task.calls(case, number), case.tried)
        if found is not None:
            return told.changed(observed, case.tried) or found
    return told.changed(observed, case.tried) or told.hooked(observed, case.tried)


def _recorded(task: Task, case: Case, observed: Observed) -> Verdict | None:
    return seen.recorded(observed, len(case.asks), case.tried, made=False)


def _record(task: Task, case: Case, observed: Observed) -> Verdict | None:
    for rank, record in enumerate(observed.records):
        for number, part in enumerate(seen.parts(record, len(case.asks), made=False)):
            found = task.record(case, number, rank, record, part)
            if found is not None:
                return found
    return None


def in_groups(parts: Sequence[Any], t: int) -> list[Any]:
    """Per rank the sum over its group of t."""
    sums = [sum(parts[begin : begin + t]) for begin in range(0, len(parts), t)]
    return [sums[rank // t] for rank in range(len(parts))]


def largest_in_groups(parts: Sequence[Any], t: int) -> list[Any]:
    """Per rank, element by element, the largest of its group of t: what op=MAX gives."""
    import torch

    tops = [torch.stack(list(parts[begin : begin + t])).amax(0) for begin in range(0, len(parts), t)]
    return [tops[rank // t] for rank in range(len(parts))]
