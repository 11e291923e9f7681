"""What is wrong with a pipelined step: its values, its work, its order. Questions that 7.2 and 7.3 share.

Each gives a failing Verdict, or None. Left out: what only one of the two asks.
"""

from __future__ import annotations

import torch

import labkit.labs.lab07.steps as steps
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab07.steps import Case
from labkit.schedule.theory import idle_share

TOLERANCE = 1e-4  # of a gradient's largest element; sums in another order stay well below 1e-5 of it
ROOM = 0.002  # points of idle share over theory
Gradients = list[list[torch.Tensor]]  # by rank and weight
# What torch says of a `.grad` that is None: sent, or used; and of a backward without a graph.
_WITHOUT_GRAPH = ("NoneType", "Expected parameter `tensor`", "does not require grad")


def ran(case: Case, observed: Observed, name: str) -> Verdict | None:
    """As `attempts.ran`, with a word on what commonly makes a pipeline fail."""
    found = attempts.ran(observed, name, case.tried)
    if found is None or found.cause in attempts.CAUSES:
        return found
    if found.cause == "raised" and any(word in found.sentence for word in _WITHOUT_GRAPH):
        sentence = (
            "what is received has no graph: it must require grad before the stage uses it, or no gradient comes out of "
            f"it to send back. {found.sentence}"
        )
        return wrong("attempted", "no_requires_grad", sentence, found.tried, found.got, found.expected)
    if found.cause == "deadlock":
        sentence = f"ranks wait for each other: one sends while the other sends, too. {found.sentence}"
        return wrong("attempted", "deadlock", sentence, found.tried, found.got, found.expected)
    return found


def values(case: Case, observed: Observed) -> Verdict | None:
    """The loss of the last rank, and every rank's gradients."""
    losses, parts = steps.serial(case)
    found = _gradient_missing(case, observed)
    if found is not None:
        return found
    due = [[sum(of[rank][k] for of in parts) / case.microbatches for k in range(len(own))]
           for rank, own in enumerate(case.weights)]  # fmt: skip
    got = [result[1] for result in observed.results]
    bad = [rank for rank in range(case.ranks) if not _same(got[rank], due[rank])]
    if bad:
        return _known_gradients(case, got, due, parts, bad)
    return _loss(case, observed, losses)


def _gradient_missing(case: Case, observed: Observed) -> Verdict | None:
    without = [rank for rank, result in enumerate(observed.results) if any(each is None for each in result[1])]
    if not without:
        return None
    if len(without) == case.ranks:
        sentence, cause = "no rank has a gradient: backward is missing.", "no_backward"
    else:
        cause = "not_handed_on"
        sentence = (
            f"rank {without[-1]} has no gradient: backward of a stage begins with the gradient of its output, which "
            "the rank after it sends."
        )
    return wrong("values", cause, sentence, case.tried, f"rank {without[-1]}: .grad is None", "a gradient")


def _known_gradients(case: Case, got: Gradients, due: Gradients, parts: list[Gradients], bad: list[int]) -> Verdict:
    rank, m = bad[-1], case.microbatches
    cause, sentence = "wrong_gradients", f"the gradients of rank {rank} are not those of the serial run."
    if _all_same(got, [[m * each for each in own] for own in due]):
        cause = "not_divided"
        sentence = f"every gradient is {m} times too large: the loss is the mean over {m} microbatches, not their sum."
    elif any(_all_same(got, _share(part, 1)) or _all_same(got, _share(part, m)) for part in parts):
        cause = "one_microbatch"
        sentence = "these are the gradients of one microbatch: the others' backward is missing, or was overwritten."
    elif len(bad) < case.ranks and case.ranks - 1 not in bad:
        cause = "mixed_up"
        sentence = (
            f"the last rank is right and rank {rank} is not: the gradient that comes back for a microbatch must meet "
            "the output of the same microbatch, and be that of the next stage's input."
        )
    expected = f"{float(due[rank][0].flatten()[0]):.6g}"
    return wrong("values", cause, sentence, case.tried, f"{float(got[rank][0].flatten()[0]):.6g}", expected)


def _share(part: Gradients, count: int) -> Gradients:
    return [[each / count for each in own] for own in part]


def _all_same(one: Gradients, other: Gradients) -> bool:
    return all(_same(a, b) for a, b in zip(one, other, strict=True))


def _same(got: list[torch.Tensor], due: list[torch.Tensor]) -> bool:
    for mine, right in zip(got, due, strict=True):
        if mine.shape != right.shape or float((mine - right).abs().max()) > TOLERANCE * float(right.abs().max()):
            return False
    return True


def _loss(case: Case, observed: Observed, losses: list[float]) -> Verdict | None:
    loss, mean = observed.results[-1][0], sum(losses) / len(losses)
    if isinstance(loss, float) and abs(loss - mean) <= TOLERANCE * abs(mean):
        return None
    sentence = "the last rank returns the mean loss of all microbatches."
    if isinstance(loss, float) and abs(loss - sum(losses)) <= TOLERANCE * sum(losses):
        sentence = "the gradients are right, but the loss returned is the sum over microbatches: return their mean."
    elif loss is None:
        sentence = "the gradients are right, but the last rank returned nothing: it returns the mean loss."
    got = f"rank {case.ranks - 1}: {loss if isinstance(loss, (str, float)) else kind(loss)}"
    return wrong("values", "wrong_loss", sentence, case.tried, got, f"{mean:.6g}")


def work(case: Case, observed: Observed) -> Verdict | None:
    """A stage runs each microbatch forward and backward once, on its own rank alone; messages are what they must be."""
    for rank, (result, record) in enumerate(zip(observed.results, observed.records, strict=True)):
        notes = result[2]
        flops = sum(getattr(event, "flops", 0) for event in record.events)
        got, due = f"rank {rank}: {flops / case.flops:.2f} of a stage's FLOPs", "1.00"
        if flops > 1.5 * case.flops:
            sentence = f"rank {rank} does the work of other stages, too: a rank computes with its own stage alone."
            return wrong("evidence", "whole_model", sentence, case.tried, got, due)
        forwards = [note for note in notes if note[0] == "F"]
        if flops > 1.02 * case.flops or len(forwards) > case.microbatches:
            sentence = f"rank {rank} runs forward more than once for a microbatch: keep the outputs for backward."
            return wrong("evidence", "recomputed", sentence, case.tried, got, due)
        if flops < 0.98 * case.flops or len(notes) < 2 * case.microbatches:
            sentence = f"rank {rank} has its gradients, but not by running its stage forward and backward."
            return wrong("evidence", "not_own_work", sentence, case.tried, got, due)
        if [note[0] for note in notes] != (came := steps.order(record)):
            sentence = f"rank {rank}'s stage does not say what its record says: leave its notes to it."
            return wrong("evidence", "notes_changed", sentence, case.tried, " ".join(notes), " ".join(came))
    return _bytes(case, observed)


def _bytes(case: Case, observed: Observed) -> Verdict | None:
    if evidence.collectives(observed):
        return None
    rows, width = case.shape
    one, last = case.microbatches * rows * width * 4, case.ranks - 1
    due = [one * ((rank < last) + (rank > 0)) for rank in range(case.ranks)]
    return evidence.bytes_sent_equal(observed, due, case.tried)


def waited(case: Case, observed: Observed) -> Verdict | None:
    """Every message was waited for. Cause "not_waited"."""
    found = attempts.never_waited(observed)
    if found is None:
        return attempts.all_waited(observed, case.tried)
    rank, op = found
    sentence = f"rank {rank} never waits for its i{op}: before wait() nothing says that it is over."
    return wrong("evidence", "not_waited", sentence, case.tried, f"an i{op} without wait()", "every one waited for")


def one_at_a_time(case: Case, observed: Observed) -> Verdict | None:
    """The first rank ends a microbatch before it begins the next: no pipeline at all. Cause "one_at_a_time"."""
    notes = observed.results[0][2]
    if case.microbatches > 1 and notes[:3] == ["F0", "B0", "F1"]:
        sentence = (
            "a microbatch goes forward and backward through all stages before the next one begins, so one rank works "
            "while the others wait: let the first rank go on with the next microbatch."
        )
        share = f"{steps.replayed(observed).idle_share:.1%} idle, replayed"
        return wrong("evidence", "one_at_a_time", sentence, case.tried, share, f"{theory(case):.1%}")
    return None


def theory(case: Case) -> float:
    """Idle share of all time, GPipe's and 1F1B's."""
    return idle_share(case.ranks, case.microbatches)


def idle(case: Case, observed: Observed) -> Verdict | None:
    """Replayed on a free link with rendezvous sends: it comes to an end, and idles as theory says.

    Causes "deadlock" and "idle".
    """
    played = steps.replayed(observed)
    if played.deadlock:
        sentence = (
            "with sends that wait for their receiver, as large messages do, ranks wait for each other here; small ones "
            "went through. Post a send and a receive that may meet together (isend, irecv, batch_isend_irecv)."
        )
        return wrong("evidence", "deadlock", sentence, case.tried, played.deadlock, "every rank ends")
    due = theory(case)
    if played.idle_share > due + ROOM:
        sentence = (
            f"on equal stages and a free link ranks idle for longer than (p-1)/(m+p-1): {_waits(case, played)} "
            "What could it do meanwhile?"
        )
        return wrong("evidence", "idle", sentence, case.tried, f"{played.idle_share:.1%} idle", f"{due:.1%}")
    return None


def _waits(case: Case, played) -> str:
    """Which rank stands still for longest, in words."""
    rank = max(range(case.ranks), key=lambda each: (played.exposed_s(each), each))
    return f"rank {rank} waits for messages for {played.exposed_s(rank) / played.time_s:.0%} of the step."
