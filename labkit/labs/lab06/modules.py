"""The judge that the classes of lab 06 share: weights, output and gradients on every rank, then how they came about.

An exercise's module says what is due and which mistakes it knows, as a `Task`. Left out: functions (`functions`).
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
from labkit.labs.lab06.in_rank import Plan


@dataclass(frozen=True)
class Case:
    """One launch. asks: per call, per rank (inputs, output's gradient)."""

    what: str
    plan: Plan
    asks: tuple[tuple[tuple[tuple, Any], ...], ...]

    @property
    def tried(self) -> str:
        return f"{told.groups(self.plan.world, self.plan.t)}, {self.what}"


@dataclass(frozen=True)
class Task:
    """What one exercise demands. Functions of a Case.

    weights, calls: Due of the parameters, and of one call (its number). told_shapes: (shapes on rank 0, those due) ->
    (cause, sentence) or None. communication: (case, number, events of forward, events of backward) of a rank -> a
    failing (cause, sentence, what was due) or None. flops: forward, of a call. kept: (bytes due, bytes of the serial
    module). failed: (case, observed, verdict) -> (cause, sentence) of a run that failed, or None.
    """

    name: str
    weights: Callable[[Case], told.Due]
    calls: Callable[[Case, int], told.Due]
    told_shapes: Callable[[Case, dict, dict], tuple[str, str] | None]
    communication: Callable[[Case, int, list, list], tuple[str, str, str] | None]
    flops: Callable[[Case, int], int]
    kept: Callable[[Case], tuple[int, int]]
    output_shape: tuple[str, str] | None = None
    failed: Callable[[Case, Observed, Verdict], tuple[str, str] | None] = lambda case, observed, failed: None


def judged(cls: Callable, task: Task, cases: Sequence[Case]) -> tuple[Verdict | None, list[Observed]]:
    """(the first failure or None, what was seen of each case)."""
    then = (_recorded, asking.waited, _communication, _kept, _work, asking.honestly)
    return asking.in_turn(task, cases, lambda case: observe(cls, case), (_shapes, _values), then)


def observe(cls: Callable, case: Case) -> Observed:
    """Lead an answer through the case's calls on ranks, under watch."""
    rank_args = [([ask[rank] for ask in case.asks],) for rank in range(case.plan.world)]
    return evidence.observe(
        in_rank.module_calls, case.plan.world, args=(cls, case.plan), rank_args=rank_args, deadline_s=60.0
    )


def _shapes(task: Task, case: Case, observed: Observed) -> Verdict | None:
    due = dict(case.plan.shapes)
    for rank, result in enumerate(observed.results):
        got = result["shapes"]
        if got == due:
            continue
        if result["others"]:
            sentence = f"{result['others'][0]} is a tensor and not an nn.Parameter: no optimizer would find it."
            return wrong("shape", "not_a_parameter", sentence, case.tried, f"rank {rank}: {_named(got)}", _named(due))
        cause, sentence = task.told_shapes(case, got, due) or (
            "wrong_shape",
            f"rank {rank}'s parameters have other names or shapes than are due.",
        )
        return wrong("shape", cause, sentence, case.tried, f"rank {rank}: {_named(got)}", _named(due))
    return None


def _named(shapes: dict[str, tuple]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()) or "no parameters"


def _values(task: Task, case: Case, observed: Observed) -> Verdict | None:
    found = told.values([result["weights"] for result in observed.results], task.weights(case), case.tried)
    found = found or told.changed(observed, case.tried)
    for number in range(len(case.asks)):
        if found is None:
            got = [result["asks"][number] for result in observed.results]
            found = told.values(got, task.calls(case, number), case.tried, task.output_shape)
    return found


def _recorded(task: Task, case: Case, observed: Observed) -> Verdict | None:
    return seen.recorded(observed, len(case.asks), case.tried)


def _communication(task: Task, case: Case, observed: Observed) -> Verdict | None:
    for rank, record in enumerate(observed.records):
        begin, made = in_rank.marks(record)[:2]
        events = seen.between(record, begin, made)
        if events:
            sentence = f"{task.name} communicates while it is made: every rank has the serial module and cuts it alone."
            return wrong("evidence", "talks_when_made", sentence, case.tried, seen.words(events), "nothing")
        for number, part in enumerate(seen.parts(record, len(case.asks))):
            forward = seen.between(record, part.begin, part.middle)
            backward = seen.between(record, part.middle, part.end)
            found = task.communication(case, number, forward, backward)
            if found is not None:
                got = f"rank {rank}: forward {seen.words(forward)}; backward {seen.words(backward)}"
                return wrong("evidence", found[0], found[1], case.tried, got, found[2])
    return None


def _kept(task: Task, case: Case, observed: Observed) -> Verdict | None:
    return seen.kept_share(observed, *task.kept(case), case.tried)


def _work(task: Task, case: Case, observed: Observed) -> Verdict | None:
    count = len(case.asks)
    return seen.work_is_cut(observed, [task.flops(case, number) for number in range(count)], count, case.tried)


def one_all_reduce(
    forward: list, backward: list, due: tuple[int, int], num_bytes: int
) -> tuple[str, str, str] | None:
    """Whether exactly due[0] and due[1] all_reduces of num_bytes were sent, and nothing else.

    Causes: "gathered", "too_many_calls", "backward_call", "forward_call", "missing_call", "other_size".
    """
    wanted = f"forward {due[0]} all_reduce, backward {due[1]}, of {num_bytes} bytes"
    for events, count, where in ((forward, due[0], "forward"), (backward, due[1], "backward")):
        others = [event for event in events if event.op != "all_reduce"]
        if others:
            op = others[0].op
            sentence = f"{op} in {where}: parts that every rank has anyway, or their sum, are all that is needed."
            return "gathered" if "gather" in op else "other_call", sentence, wanted
        if len(events) > count:
            if not count:
                sentence = f"an all_reduce in {where}, where nothing is left to be summed."
                return f"{where}_call", sentence, wanted
            sentence = f"{len(events)} all_reduces in {where}, where {count} will do: sum once, of everything."
            return "too_many_calls", sentence, wanted
        if len(events) < count:
            return "missing_call", f"the values are right, but no all_reduce was seen in {where}.", wanted
        if any(event.num_bytes != num_bytes for event in events):
            return "other_size", f"the all_reduce in {where} carries more or less than the tensor to be summed.", wanted
    return None
