"""Judge of exercise 7.3, `one_f_one_b`: a backward as soon as there is one, and so few microbatches in flight.

Values and work as in 7.2. Evidence: rank r has at most min(m, p - r) microbatches in flight, and holds nothing of those
that are done: no activations, nothing received, nothing sent, of which handles of isend in a list would keep all; the
replay of the record, with sends that wait for their receivers, comes to an end and idles (p-1)/(m+p-1). Left out:
interleaved stages, which 7.5 is free to use.
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
from labkit.record.events import RankRecord

NAME = "one_f_one_b"
# Hidden states received, or sent, beside those in flight: buffers, gradients, sends that are not waited for yet, of
# which there may be as many each way as four ranks have in flight.
FEW = 8


def judge(fn: Callable, seed: int) -> Verdict:
    """Fewer microbatches than rank 0 would begin with, then so many that all of them are more than those in flight
    and FEW."""
    rng, seen = random.Random(seed), []
    for ranks, microbatches in ((4, 2), (4, rng.randint(14, 16))):
        case = steps.draw(rng, NAME, ranks, microbatches)
        observed = steps.observe(fn, case)
        found = told.ran(case, observed, NAME) or told.values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    order = (told.work, told.waited, told.one_at_a_time, few_in_flight, let_go, few_received, few_sent, told.idle)
    for question in (*order, _honest):
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
    """Cause "kept": activations of microbatches whose backward is over. A copy of the input is allowed for each one in
    flight, and two hidden states besides: a loss has some. Not what is as large as a weight: a gradient that
    torch.autograd.grad gave and that is added by hand."""
    width = case.shape[1]
    for rank, record in enumerate(observed.records):
        due = min(case.microbatches, case.ranks - rank)
        like_weights = {delta.storage for delta in record.deltas if delta.num_bytes == width * width * 4}
        storages = {storage for storage, kind in record.kinds if kind == "activation"} - like_weights
        most, limit = _most(case, record, storages), (len(case.weights[rank]) + 1) * due + 2
        if most > limit:
            sentence = (
                f"rank {rank} still keeps activations of microbatches whose backward is over: let backward free its "
                f"graph, without retain_graph, and drop what was kept.{_of_the_loss(case, rank)}"
            )
            return wrong("evidence", "kept", sentence, case.tried, f"{most} hidden states", f"at most {limit}")
    return None


def _of_the_loss(case: Case, rank: int) -> str:
    """What else the last rank may have kept."""
    last = rank == case.ranks - 1
    return " A loss in a list keeps its microbatch's input, too: put detach() or item() of it there." if last else ""


def few_received(case: Case, observed: Observed) -> Verdict | None:
    """Cause "kept": what came for microbatches that are not in flight is held as well. What is received and sent is of
    the kind communication, and none of the activations that `let_go` looks at."""
    for rank, record in enumerate(observed.records):
        storages = {storage for each in record.communications if each.received_bytes for storage in each.writes}
        due = min(case.microbatches, case.ranks - rank) if rank > 0 else 0
        count = _most(case, record, storages)
        if count > due + FEW:
            sentence = (
                f"rank {rank} holds {count} tensors that it receives, all at once, and {due + FEW} would do: make one "
                "when a microbatch comes, and drop what was kept of it once its backward is over; a handle of irecv "
                f"keeps its tensor even after wait().{_of_the_loss(case, rank)}"
            )
            return wrong("evidence", "kept", sentence, case.tried, f"{count} tensors", f"at most {due + FEW}")
    return None


def few_sent(case: Case, observed: Observed) -> Verdict | None:
    """Cause "sent_kept": what was sent piles up. Outputs of microbatches in flight are held for their backward."""
    last = case.ranks - 1
    for rank, record in enumerate(observed.records):
        storages = {storage for each in record.communications if each.sent_bytes for storage in each.reads}
        due = min(case.microbatches, case.ranks - rank) if rank < last else 0
        count = _most(case, record, storages)
        if count > due + FEW:
            sentence = (
                f"rank {rank} holds {count} tensors that it sends, all at once, and {due + FEW} would do: a handle of "
                "isend keeps its tensor even after wait(). Wait for it before the next send in the same direction, "
                "when the neighbour has taken it long since, and drop it then, not at the end."
            )
            return wrong("evidence", "sent_kept", sentence, case.tried, f"{count} tensors", f"at most {due + FEW}")
    return None


def _most(case: Case, record: RankRecord, storages: set[int]) -> int:
    """The most that these storages hold at a time, in hidden states."""
    now = most = sum(num_bytes for storage, num_bytes in record.begin if storage in storages)
    for delta in record.deltas:
        now += delta.num_bytes if delta.storage in storages else 0
        most = max(most, now)
    rows, width = case.shape
    return most // (rows * width * 4)


def _honest(case: Case, observed: Observed) -> Verdict | None:
    return honest(observed, case.tried)
