"""How gradients were averaged in exercise 2.2: by the records of training steps, and their replay.

Left out: whether they are right (`bucketed`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.bucketed_cases as cases
import labkit.labs.lab02.bucketed_steps as steps
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab02.bucketed_cases import Case
from labkit.record.events import Collective

MOST_EXPOSED = 0.25  # of the naive way's exposed communication
LEAST_OVERLAPPED = 0.5  # of the all_reduces; what is sent last has nothing left to hide behind
MORE_WORK = 1.02  # of the FLOPs, and of the time, that a step takes without communication


@dataclass(frozen=True)
class Gradients:
    """What a step has to send: bytes of each trained parameter's gradient."""

    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def slack_bytes(self) -> int:
        """Room for flags among what is all_reduced: which parameters took part, say."""
        return 8 * len(self.sizes) + 64

    @property
    def agreed_bytes(self) -> int:
        """Room for what ranks agree on in whole numbers otherwise: an order, or pickled lists of who took part."""
        return 64 * len(self.sizes) + 1024

    def most(self, bucket_bytes: int) -> int:
        """All_reduces that buckets of at most bucket_bytes may need, however they are filled one after another.

        Of two buckets that follow, the second began because the first had no room: together they hold more than one
        bucket may, or one of them is a large parameter's own. And one more for flags.
        """
        large = sum(size > bucket_bytes for size in self.sizes)
        return 2 * -(-self.num_bytes // bucket_bytes) + 2 * large + 1


def gradients_of(case: Case) -> Gradients:
    """Of the case's model."""
    trained = [each for each in cases.module_of(case).parameters() if each.requires_grad]
    return Gradients(tuple(each.nbytes for each in trained))


def by_hand(case: Case, observed: Observed) -> Verdict | None:
    """Every all_reduce was issued from Python."""
    for rank, record in enumerate(observed.records):
        for event in record.collectives:
            if event.op == "all_reduce" and not event.in_python:
                sentence = f"rank {rank}'s all_reduces come from C++, as torch's own reducer's do: issue them yourself."
                return wrong("evidence", "ready_made", sentence, case.tried, event.call, "dist.all_reduce")
    return None


def small(case: Case, observed: Observed) -> Verdict | None:
    """Of every step: only all_reduces, every gradient once, buckets within their size, no early wait."""
    due = gradients_of(case)
    for rank, record in enumerate(observed.records):
        for step in steps.steps_of(record):
            sizes = None if case.what == "mixed" else _sizes(case, step, due)
            found = _operations(case, rank, step, due) or sizes or _waits(case, rank, step)
            if found is not None:
                return found
    return None


def large(case: Case, observed: Observed) -> tuple[Verdict | None, str]:
    """(what is wrong or None, figures for a pass) of the named model: the same, and how much of it is hidden."""
    due = gradients_of(case)
    by_rank = [steps.steps_of(record) for record in observed.records]
    for rank, found_steps in enumerate(by_rank):
        if len(found_steps) != case.steps:
            sentence = f"the record of rank {rank} does not show the {case.steps} steps that it was led through."
            got = f"{len(found_steps)} steps"
            return wrong("evidence", "no_record", sentence, case.tried, got, f"{case.steps}"), ""
        for step in found_steps:
            found = _operations(case, rank, step, due) or _sizes(case, step, due) or _count(case, step, due)
            found = found or _issued(case, rank, step) or _waits(case, rank, step)
            if found is not None:
                return found, ""
    figures, plain = "", functools.cache(functools.partial(_plain, case))  # a launch: once, and if it is needed at all
    for number in range(case.steps):
        found, figures = _hidden(case, [found_steps[number] for found_steps in by_rank], due, plain)
        if found is not None:
            return found, ""
    return None, figures


def waited(case: Case, observed: Observed) -> Verdict | None:
    """What wrong values may come from: an all_reduce that nobody waited for, or whose result was used before."""
    for rank, record in enumerate(observed.records):
        for step in steps.steps_of(record):
            found = _not_waited(case, rank, step, "what it uses may be half done")
            if found is not None:
                return found
    return None


def _collectives(step: steps.Step) -> list[Collective]:
    """Those that carry gradients: no barrier, and no flags, which say in whole numbers who took part."""
    return [each for each in step.record.collectives if each.op != "barrier" and "float" in each.dtype]


def _operations(case: Case, rank: int, step: steps.Step, due: Gradients) -> Verdict | None:
    reduced = [each for each in step.record.communications if each.op == "all_reduce"]
    others = [each for each in step.record.communications if each.op not in ("all_reduce", "barrier")]
    whole = [each for each in others if "int" in each.dtype or each.dtype == "bool"]
    if sum(each.num_bytes for each in whole) <= due.agreed_bytes:
        others = [each for each in others if each not in whole]
    return _other_operations(case, [each.op for each in others]) or _bytes(case, rank, reduced, due)


def _other_operations(case: Case, ops: list[str]) -> Verdict | None:
    if not ops:
        return None
    told = ", ".join(dict.fromkeys(ops))
    cause, sentence = "other_operations", f"a step has no need of {told}: all_reduce adds up the buckets on every rank."
    if "reduce_scatter" in ops:
        sentence = f"{told} together are an all_reduce in two calls: one all_reduce a bucket does it."
    elif "all_gather" in ops:
        cause = "all_gather"
        sentence = f"all_gather brings all gradients to every rank: each sends them {case.world_size - 1} times."
    return wrong("evidence", cause, sentence, case.tried, told, "all_reduce")


def _bytes(case: Case, rank: int, reduced: list[Collective], due: Gradients) -> Verdict | None:
    """Every gradient once. Gradients that took no part anywhere need not be sent."""
    sent = sum(each.num_bytes for each in reduced)
    got, wanted = f"rank {rank}: {sent} bytes all_reduced in a step", f"{due.num_bytes} bytes, every gradient once"
    most, least = due.num_bytes, 0 if case.plan.branches else due.num_bytes
    if case.plan.second:  # converted to the wider dtype, or each in its own
        most = 2 * most
    others = [each.dtype for each in reduced if "float" in each.dtype and each.dtype != case.plan.dtype]
    if sent > most + due.slack_bytes:
        cause, sentence = "bytes_extra", "more than the gradients is sent in a step."
        if not case.plan.second and "float64" in others:
            cause, sentence = "wider_dtype", f"{case.plan.dtype} gradients are sent as float64: twice the bytes."
        elif sent >= 1.9 * most:
            cause, sentence = "sent_twice", "gradients are sent more than once in a step."
        return wrong("evidence", cause, sentence, case.tried, got, wanted)
    if sent < least:
        cause, sentence = "no_traffic", "the values are right, but the gradients did not go through all_reduce."
        if others and not case.plan.second:
            cause, sentence = "dtype_lost", f"{case.plan.dtype} gradients are sent as {others[0]}: too coarse."
        return wrong("evidence", cause, sentence, case.tried, got, wanted)
    return None


def _sizes(case: Case, step: steps.Step, due: Gradients) -> Verdict | None:
    for each in _collectives(step):
        if each.num_bytes > case.bucket_bytes and each.num_bytes not in due.sizes:
            cause, sentence = "bucket_too_large", "a bucket holds more than bucket_bytes: begin another in time."
            if each.num_bytes >= 0.9 * due.num_bytes:
                cause, sentence = "one_bucket", "all gradients go in one bucket: it is full only when backward is over."
            limit = f"at most {case.bucket_bytes}"
            return wrong("evidence", cause, sentence, case.tried, f"an all_reduce of {each.num_bytes} bytes", limit)
    return None


def _count(case: Case, step: steps.Step, due: Gradients) -> Verdict | None:
    count, most = len(_collectives(step)), due.most(case.bucket_bytes)
    if count <= most:
        return None
    cause, sentence = "too_many_buckets", "buckets are far from full, and every all_reduce costs its latency."
    if count >= len(due.sizes):
        cause, sentence = "no_buckets", "every gradient goes by itself, and each all_reduce costs latency: use buckets."
    return wrong("evidence", cause, sentence, case.tried, f"{count} all_reduces a step", f"at most {most}")


def _issued(case: Case, rank: int, step: steps.Step) -> Verdict | None:
    found = _collectives(step)
    if all(each.index > step.finish for each in found):
        sentence = "every all_reduce starts when backward is over: start a bucket's when its last gradient is there."
        got = "all issued in finish()"
        return wrong("evidence", "after_backward", sentence, case.tried, got, "issued in backward")
    blocking = {wait.of for wait in step.record.waits if wait.blocking and wait.index < step.finish}
    if any(each.index in blocking for each in found):
        sentence = "backward stands still in each all_reduce: give async_op=True, and wait in finish()."
        got = f"rank {rank}: blocking all_reduces"
        return wrong("evidence", "blocking", sentence, case.tried, got, "async_op=True")
    return None


def _not_waited(case: Case, rank: int, step: steps.Step, luck: str) -> Verdict | None:
    """Every all_reduce is waited for by the end of finish(), before its result is used."""
    waits = [wait for wait in step.record.waits if wait.index < step.optimizer]
    found = {each.index for each in _collectives(step)}
    if any(wait.of in found and wait.how == "touched" for wait in waits):
        sentence = f"rank {rank} uses a bucket while its all_reduce may be under way: wait() first, in finish()."
        return wrong("evidence", "touched_early", sentence, case.tried, "no wait()", "a wait, then the bucket")
    if not found <= {wait.of for wait in waits}:
        sentence = f"rank {rank} does not wait for every all_reduce in finish(): {luck}."
        got = "an all_reduce without wait()"
        return wrong("evidence", "not_waited", sentence, case.tried, got, "all waited for")
    return None


def _waits(case: Case, rank: int, step: steps.Step) -> Verdict | None:
    """Every all_reduce is waited for by the end of finish(), and none before the last was issued."""
    found = _not_waited(case, rank, step, "values are right by luck")
    if found is not None:
        return found
    sent = {each.index for each in _collectives(step)}
    early = [wait for wait in step.record.waits if wait.of in sent and wait.index < max(sent)]
    if not early:
        return None
    count = len(_collectives(step))
    sentence = "a bucket is waited for before the last one is sent: nothing is hidden while a rank waits."
    got = f"rank {rank}: {len(early)} of {count} waited for before the last was issued"
    return wrong("evidence", "waits_early", sentence, case.tried, got, "first issue all, then wait")


def _hidden(case: Case, last: list[steps.Step], due: Gradients, plain: Callable) -> tuple[Verdict | None, str]:
    """How much communication hides behind backward's own work, by the record and by its replay.

    plain(): the record of a step without communication.
    """
    from labkit.record.measures import exposed_s, overlapped_share
    from labkit.record.replay import prices, replay

    priced = prices(cluster())
    alone = [steps.backward_alone(step) for step in last]
    naive = naive_s(due)
    share = min(overlapped_share(record) or 0.0 for record in alone)
    for_show = min(overlapped_share(step.record) or 0.0 for step in last)
    exposed = max(exposed_s(replay(alone, priced))) / naive
    as_recorded = max(exposed_s(replay([step.record for step in last], priced))) / naive
    where = f"{case.tried}, {cases.CLUSTER}"
    got = f"{share:.0%} of all_reduces overlap backward, {exposed:.0%} of naive communication exposed"
    due_text = f"at least {LEAST_OVERLAPPED:.0%} overlap, at most {MOST_EXPOSED:.0%} exposed"
    if share < LEAST_OVERLAPPED or exposed > MOST_EXPOSED:
        cause, sentence = "exposed", "buckets are sent late: too much of them is left when backward is over."
        if share < LEAST_OVERLAPPED:
            sentence = "hardly any of backward is left when buckets are sent: gradients come last layer first."
            cause = "no_overlap"
        if for_show >= LEAST_OVERLAPPED and as_recorded <= MOST_EXPOSED:
            cause, sentence = "fake_work", "communication hides behind work that is not backward's and costs time."
        return wrong("evidence", cause, sentence, where, got, due_text), ""
    found = _extra_work(case, alone, due, plain())
    return found, (
        f"{len(_collectives(last[0]))} all_reduces a step, every gradient once; on {cases.CLUSTER} {exposed:.0%} of "
        f"the naive way's communication is exposed, and {share:.0%} of the all_reduces start while backward goes on"
    )


def _extra_work(case: Case, alone: list[Any], due: Gradients, plain: Any) -> Verdict | None:
    """Autograd does what it would do without communication, but for adding to gradients that are there already."""
    from labkit.record.replay import prices

    priced = prices(cluster())
    added_s = cluster().node.device.time_s(0.0, 4 * due.num_bytes)
    plain_s = sum(priced.op(0, op) for op in plain.ops)
    for rank, record in enumerate(alone):
        flops = record.flops / plain.flops
        time = (sum(priced.op(rank, op) for op in record.ops) - added_s) / plain_s
        if max(flops, time) > MORE_WORK:
            sentence = f"rank {rank}'s step computes more than the model asks for: work for show hides nothing."
            got = f"{flops:.2f} times the FLOPs, {time:.2f} times the time"
            return wrong("evidence", "fake_work", sentence, case.tried, got, f"at most {MORE_WORK} times")
    return None


def _plain(case: Case) -> Any:
    """The record of rank 0's last step without any communication, from a lone rank."""
    from labkit.check import evidence

    seen = evidence.observe(steps.train, 1, args=(steps.Alone,), rank_args=case.rank_args[:1], deadline_s=40.0)
    return steps.backward_alone(steps.steps_of(seen.records[0])[-1])


def cluster() -> Any:
    """The cluster on which hidden communication is asked for."""
    from labkit.cost import hardware

    return hardware.cluster("T4", per_node=cases.NUM_RANKS)


def naive_s(due: Gradients) -> float:
    """Seconds of one blocking all_reduce per gradient, after backward: all of them are exposed."""
    from labkit.cost import comm
    from labkit.cost.groups import on_cluster

    line = comm.line("all_reduce", on_cluster(cluster()))
    return sum(line.time_s(num_bytes) for num_bytes in due.sizes)
