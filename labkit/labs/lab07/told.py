"""What is wrong with a pipelined step: its values, its work, its order. Questions that 7.2 and 7.3 share.

Each gives a failing Verdict, or None. Left out: what only one of the two asks.
"""

from __future__ import annotations

import re

import torch

import labkit.labs.lab07.messages as messages
import labkit.labs.lab07.steps as steps
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab07.steps import Case
from labkit.schedule.theory import idle_share

TOLERANCE = 1e-4  # of a gradient's largest element; sums in another order stay well below 1e-5 of it
SMALL = 1024  # bytes of collectives beside the messages: a barrier, the loss for all
ROOM = 0.002  # points of idle share over theory
Gradients = list[list[torch.Tensor]]  # by rank and weight
Notes = list[str]


def ran(case: Case, observed: Observed, name: str) -> Verdict | None:
    """As `attempts.ran`, with a word on what commonly makes a pipeline fail."""
    found = attempts.ran(observed, name, case.tried)
    if found is None or found.cause in attempts.CAUSES:
        return found
    cause, sentence = found.cause, ""
    if found.cause == "raised":
        cause, sentence = _raised(observed, found.sentence)
        if "index out of range" in found.sentence and case.microbatches < case.ranks - 1:
            m, cause = case.microbatches, "few_microbatches"
            sentence = f"here are {m} microbatches for {case.ranks} ranks: no rank can do more than {m} forwards first."
    elif found.cause == "deadlock" and "send first" in found.sentence and "nobody has sent" not in found.sentence:
        sentence = "ranks wait for each other: one sends while the other sends, too."
    elif found.cause == "deadlock" and _neighbours(found.sentence):
        sentence = (
            "one rank waits for a gradient, the next one for an input: was every output sent, and how many forwards "
            "does a rank do before its first backward?"
        )
    elif found.cause in ("deadline", "stalled", "not_waited"):
        sentence = messages.left_behind(observed)
        cause = "not_waited" if sentence else cause
    if not sentence:
        return found
    return wrong("attempted", cause, f"{sentence} {found.sentence}", found.tried, found.got, found.expected)


def _neighbours(said: str) -> bool:
    """Whether it is two neighbours that both receive first."""
    ranks = re.match(r"ranks (\d+) and (\d+) both receive first", said)
    return ranks is not None and int(ranks[2]) - int(ranks[1]) == 1


def _raised(observed: Observed, said: str) -> tuple[str, str]:
    """Cause and sentence for what torch says of a None, or of a tensor without a graph; ("raised", "") for the rest."""
    graphless = any(rank > 0 and "without_graph" in told for rank, told in observed.outcome.reports)
    grad_none = "Expected parameter `tensor`" in said or any(
        f"'NoneType' object has no attribute '{method}'" in said for method in ("clone", "detach", "contiguous")
    )
    if graphless and (grad_none or "differentiated Tensors does not require grad" in said):
        sentence = (
            "what is received has no graph: it must require grad before the stage uses it, or no gradient comes out of "
            "it to send back."
        )
        return "no_requires_grad", sentence
    if "Expected parameter `tensor`" in said:
        sentence = (
            "what is sent is None. After backward only a leaf has a `.grad`: the very tensor that was received and "
            "told requires_grad_(), and none that was computed from it."
        )
        return "no_leaf", sentence
    if "does not have a grad_fn" in said:
        sentence = (
            "backward begins at a tensor without a graph: y.detach() is for the message, and backward needs the output "
            "itself, computed with gradients switched on."
        )
        return "graph_cut", sentence
    if "linear()" in said and "NoneType" in said:
        return "no_input", "inputs are None but on rank 0: the others' input is what the rank before them sent."
    if "'NoneType' object has no attribute 'size'" in said:
        return "no_target", "targets are None but on the last rank: the loss is computed there alone."
    return "raised", ""


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
        found = messages.changed_under_way(observed, case.tried) or messages.used_too_soon(observed, case.tried)
        found = found or _overwritten(case, observed) or _left_out(case, observed)
        return found or _known_gradients(case, got, due, parts, bad)
    return _loss(case, observed, losses)


def _gradient_missing(case: Case, observed: Observed) -> Verdict | None:
    without = [rank for rank, result in enumerate(observed.results) if any(each is None for each in result[1])]
    if not without:
        return None
    backwards = [rank for rank in without if _count(observed.results[rank][2], "B")]
    rank = (backwards or without)[-1]
    if backwards:
        cause = "not_added"
        sentence = (
            f"rank {rank} runs backward through its stage, and afterwards its weights have no `.grad`: leave there "
            "what y.backward() adds; torch.autograd.grad only gives gradients back."
        )
    elif len(without) == case.ranks:
        sentence, cause = "no rank has a gradient: backward is missing.", "no_backward"
    else:
        cause = "not_handed_on"
        sentence = (
            f"rank {rank} has no gradient: backward of a stage begins with the gradient of its output, which "
            "the rank after it sends."
        )
    return wrong("values", cause, sentence, case.tried, f"rank {rank}: .grad is None", "a gradient")


def _overwritten(case: Case, observed: Observed) -> Verdict | None:
    """Cause "overwritten": a microbatch's input lies where that of another one lies whose backward is still to come."""
    for rank, result in enumerate(observed.results):
        if result[3] is not None:
            one, other = result[3]
            sentence = (
                f"on rank {rank} microbatch {other} is received into the tensor that holds microbatch {one}, whose "
                "backward still needs it: a tensor of its own for each."
            )
            return wrong("values", "overwritten", sentence, case.tried, "one buffer", "one for each in flight")
    return None


def _left_out(case: Case, observed: Observed) -> Verdict | None:
    """Cause "left_out": on all ranks, microbatches that never ran forward, or whose backward never came."""
    for note, name in (("F", "forward"), ("B", "backward")):
        counts = [_count(result[2], note) for result in observed.results]
        if 1 < max(counts) < case.microbatches:
            sentence = f"{name} ran for {max(counts)} of {case.microbatches} microbatches: the others are left out."
            return wrong("values", "left_out", sentence, case.tried, max(counts), case.microbatches)
    return None


def _count(notes: Notes, letter: str) -> int:
    return sum(note[0] == letter for note in notes)


def _known_gradients(case: Case, got: Gradients, due: Gradients, parts: list[Gradients], bad: list[int]) -> Verdict:
    rank, m = bad[-1], case.microbatches
    cause, sentence = "wrong_gradients", f"the gradients of rank {rank} are not those of the serial run."
    if _all_same(got, [[m * each for each in own] for own in due]):
        cause = "not_divided"
        sentence = f"every gradient is {m} times too large: the loss is the mean over {m} microbatches, not their sum."
    elif any(_all_same(got, _share(part, 1)) or _all_same(got, _share(part, m)) for part in parts):
        cause = "one_microbatch"
        sentence = "these are the gradients of one microbatch: the others' backward is missing, or was overwritten."
    elif factors := _factors(got, due):
        factor = factors[rank]
        cause = "scaled"
        sentence = (
            f"the gradients of rank {rank} are {factor:.4g} times what they should be: the loss, or its gradient, is "
            f"divided by {m} once, on the last rank; a gradient that comes back has been divided already."
        )
    elif len(bad) < case.ranks and case.ranks - 1 not in bad:
        cause = "mixed_up"
        sentence = (
            f"the last rank is right and rank {rank} is not: the gradient that comes back for a microbatch must meet "
            "the output of the same microbatch, and be that of the next stage's input."
        )
    elif rank == case.ranks - 1:
        sentence += " Does every output meet the target of its own microbatch there, as it was sent?"
    expected = f"{float(due[rank][0].flatten()[0]):.6g}"
    return wrong("values", cause, sentence, case.tried, f"{float(got[rank][0].flatten()[0]):.6g}", expected)


def _factors(got: Gradients, due: Gradients) -> list[float]:
    """Per rank the number by which all its gradients are too large; [] when they differ by more than that."""
    factors = [float((a[0] * b[0]).sum() / (b[0] * b[0]).sum()) for a, b in zip(got, due, strict=True)]
    scaled = [[factor * each for each in own] for factor, own in zip(factors, due, strict=True)]
    return factors if min(map(abs, factors)) > 1e-6 and _all_same(got, scaled) else []


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
    """A stage runs each microbatch forward and backward once, on its own rank alone; messages are what they must be.

    The first rank may leave the gradients of its inputs out: nobody asks for them.
    """
    for rank, (result, record) in enumerate(zip(observed.results, observed.records, strict=True)):
        flops = sum(getattr(event, "flops", 0) for event in record.events)
        least = case.flops - (case.input_flops if rank == 0 else 0)
        forwards, backwards = _count(result[2], "F"), _count(result[2], "B")
        cause, sentence = _amiss(case, rank, flops, least, forwards, backwards)
        if cause:
            got = f"rank {rank}: {flops / case.flops:.2f} of a stage's FLOPs, {forwards} forwards, "
            got += f"{backwards} backwards"
            return wrong("evidence", cause, sentence, case.tried, got, f"1.00, {case.microbatches} of each")
        notes, came = result[2], steps.order(record)
        if [note[0] for note in notes] != came:
            sentence = f"rank {rank}'s stage does not say what its record says: leave its notes to it."
            return wrong("evidence", "notes_changed", sentence, case.tried, " ".join(notes), " ".join(came))
    return _bytes(case, observed)


def _amiss(case: Case, rank: int, flops: int, least: int, forwards: int, backwards: int) -> tuple[str, str]:
    """Cause and sentence for what a rank computed; "" for nothing wrong."""
    m = case.microbatches
    if forwards > m:
        return "recomputed", f"rank {rank} runs forward more than once for a microbatch: keep the outputs for backward."
    if 0 < forwards < m and flops > 0.98 * least:
        sentence = f"rank {rank} runs its stage {forwards} times for {m} microbatches: one microbatch at a time."
        return "not_cut", sentence.replace(" 1 times", " once")
    if backwards > m:
        sentence = (
            f"rank {rank} goes backward through its stage more than once for a microbatch: one backward gives both, "
            "the input's gradient and the weights'."
        )
        return "backward_twice", sentence
    if flops > 1.5 * case.flops:
        sentence = f"rank {rank} does the work of other stages, too: a rank computes with its own stage alone."
        return "whole_model", sentence
    if flops > 1.02 * case.flops:
        return "more_work", f"rank {rank} computes more than its stage's forward and backward of each microbatch."
    if flops < 0.98 * least or forwards + backwards < 2 * m:
        return "not_own_work", f"rank {rank} has its gradients, but not by running its stage forward and backward."
    return "", ""


def _bytes(case: Case, observed: Observed) -> Verdict | None:
    rows, width = case.shape
    one, last = case.microbatches * rows * width * 4, case.ranks - 1
    due = [one * ((rank < last) + (rank > 0)) for rank in range(case.ranks)]
    if not evidence.collectives(observed):
        return evidence.bytes_sent_equal(observed, due, case.tried)
    for rank, record in enumerate(observed.records):
        for way in ("sent", "received"):
            moved = sum(getattr(event, f"{way}_bytes") for event in record.communications)
            if moved > due[rank] + SMALL:
                sentence = (
                    f"rank {rank} has more {way} than its part: a hidden state goes to the next rank alone, its "
                    "gradient to the one before."
                )
                return wrong("evidence", "bytes_extra", sentence, case.tried, f"{moved} bytes", f"{due[rank]} bytes")
    return None


def waited(case: Case, observed: Observed) -> Verdict | None:
    """Every message was waited for, and until then left as it was. Causes "not_waited" and "changed_under_way"."""
    found = attempts.never_waited(observed)
    if found is None:
        found = attempts.all_waited(observed, case.tried)
        return found or messages.changed_under_way(observed, case.tried)
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
        share = f"{steps.idle_share(steps.replayed(observed)):.1%} idle, replayed"
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
    due, share = theory(case), steps.idle_share(played)
    if share > due + ROOM:
        sentence = (
            f"on equal stages and a free link ranks idle for longer than (p-1)/(m+p-1): {_waits(case, played)} "
            "What could it do meanwhile?"
        )
        return wrong("evidence", "idle", sentence, case.tried, f"{share:.1%} idle", f"{due:.1%}")
    return None


def _waits(case: Case, played) -> str:
    """Which rank stands still for longest, in words."""
    rank = max(range(case.ranks), key=lambda each: (played.exposed_s(each), each))
    return f"rank {rank} waits for messages for {played.exposed_s(rank) / played.time_s:.0%} of the step."
