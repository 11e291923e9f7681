"""What a rank held between steps and what it sent, in exercises 4.1 to 4.3, from its record.

Bytes held are those of live storages, wherever they hang (an attribute, a closure, a global, a thread's own), beside
bytes of Python's own objects. Left out: whether values are right (`told`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.average_waits as waits
import labkit.labs.lab04.models as models
import labkit.labs.lab04.training as training
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab04.models import Case
from labkit.record.events import Collective, RankRecord

COUNTER_BYTES = 32  # per parameter: a step counter, in whichever dtype and with what it comes in
SCALARS = 64  # elements a rank may send beside parameters and gradients in a step: a norm, a flag
HIDDEN_SHARE = 0.5  # of the state that others should hold: so much in Python's objects is a replica


@dataclass(frozen=True)
class Sizes:
    """elements: of each parameter that trains. world_size: ranks that share them."""

    elements: tuple[int, ...]
    world_size: int

    @property
    def total(self) -> int:
        """Ψ."""
        return sum(self.elements)

    @property
    def padded(self) -> int:
        """Ψ with every parameter padded by itself, which is the most that padding may make of it."""
        return sum(-(-n // self.world_size) * self.world_size for n in self.elements)

    @property
    def shard(self) -> int:
        """Elements of a rank's part, at most."""
        return self.padded // self.world_size


def sizes_of(case: Case) -> Sizes:
    """Of the case's model."""
    return Sizes(models.sizes(case.plan), case.world_size)


def state_bytes_per_element(case: Case) -> int:
    """m and v in fp32; where parameters are narrower, an fp32 copy of them too (ZeRO, section 3, arXiv:1910.02054)."""
    return 8 if case.plan.dtype == "float32" else 12


def width_of(case: Case) -> int:
    """Bytes of one element of a parameter or gradient."""
    return 4 if case.plan.dtype == "float32" else 2


def steps_recorded(case: Case, observed: Observed) -> Verdict | None:
    """Whether every rank's record shows all the steps."""
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        if len(steps) != case.steps:
            sentence = f"the record of rank {rank} does not show the {case.steps} steps that it was led through."
            return wrong("evidence", "no_record", sentence, case.tried, f"{len(steps)} steps", f"{case.steps}")
    return None


def waited(case: Case, observed: Observed) -> Verdict | None:
    """Whether everything that was sent was waited for before it was used."""
    found = waits.not_waited(observed)
    if found is None:
        return None
    rank, op, used = found
    sentence = f"rank {rank} never waits for its {op}: what it gives may not be there yet."
    if used:
        sentence = f"rank {rank} uses what its {op} gives before it has waited for it: right by luck, if at all."
    return wrong("evidence", "not_waited", sentence, case.tried, f"{op} without wait()", "wait(), then use")


def held_between(case: Case, observed: Observed) -> list[list[int]]:
    """By rank, then step: bytes held after zero_grad() more than before the answer was made, without `.grad`."""
    held = []
    for result, record in zip(observed.results, observed.records, strict=True):
        made, steps = training.cuts(record, case.micro)
        before = training.held_at(record, made)
        own = zip(steps, result["kept"], result["grads"], strict=True)
        held.append([training.held_at(record, cut.cleared) - before - kept - grads for cut, kept, grads in own])
    return held


def state_is_sharded(
    case: Case, observed: Observed, spare_bytes: int = 0, held: list[list[int]] | None = None
) -> Verdict | None:
    """Between steps a rank holds its share of the optimizer's state and hardly more.

    8Ψ/N bytes in fp32, 12Ψ/N in bf16 with fp32 copies; padding and step counters are counted in. spare_bytes: what
    else it may keep. held: bytes by rank and step, where not as `held_between` gives them. Causes: "full_state",
    "one_moment_whole", "copy_kept", "master_kept", "unbalanced", "state_not_sharded", "narrow_state", "state_hidden".
    """
    sizes, each = sizes_of(case), state_bytes_per_element(case)
    share = each * sizes.total / sizes.world_size
    counters = COUNTER_BYTES * (len(sizes.elements) + 2)
    most = each * sizes.shard + 2 * width_of(case) * (sizes.padded - sizes.total) + counters + spare_bytes
    held = held_between(case, observed) if held is None else held
    wanted = f"{each}Ψ/N = {share:.0f} bytes, padding and counters aside"
    for step in range(case.steps):
        now = [by_step[step] for by_step in held]
        rank = max(range(sizes.world_size), key=now.__getitem__)
        if now[rank] > most:
            cause, sentence = _too_much(now, now[rank] - share, sizes, each, counters)
            got = f"rank {rank}, after step {step}: {now[rank]} bytes"
            return wrong("evidence", cause, sentence.format(rank=rank), case.tried, got, wanted)
        if sum(now) < 0.98 * each * sizes.total:
            cause, sentence = "state_hidden", "all ranks' tensors together have no room for m and v: where are they?"
            if each == 12:
                cause = "narrow_state"
                sentence = "m, v and the copies that are updated take less than fp32 needs: keep all three in fp32."
            got = f"{sum(now)} bytes on all ranks"
            return wrong("evidence", cause, sentence, case.tried, got, f"{each}Ψ = {each * sizes.total} bytes")
    return _in_python(case, observed, sizes, each)


def _too_much(now: list[int], over: float, sizes: Sizes, each: int, counters: int) -> tuple[str, str]:
    n, psi = sizes.world_size, sizes.total
    about = lambda num_bytes: abs(over - num_bytes) <= 0.04 * psi + counters  # noqa: E731
    others = psi * (n - 1) / n
    if about(each * others) or over > each * others:
        return "full_state", "rank {rank} holds the whole model's state between steps: that is a replica, not ZeRO."
    if sum(now) <= each * sizes.padded + n * counters:
        return "unbalanced", "rank {rank} holds far more than its share: cut elements evenly, not by parameters."
    if about(4 * psi / n) and each == 8:
        sentence = "rank {rank} keeps its part of the gradients (end that: shard.grad = None), or a copy of its part "
        sentence += "of the parameters, which can be updated in place in fp32."
        return "master_kept", sentence
    if about(4 * others):
        return "one_moment_whole", "rank {rank} keeps one of m and v for the whole model: its own part of both will do."
    if about(4 * psi) or about(2 * psi) or about(4 * psi + 4 * psi / n):
        return "copy_kept", "rank {rank} keeps a whole copy of parameters or gradients between steps: let go of it."
    return "state_not_sharded", "rank {rank} holds more between steps than its share of m and v: what else is kept?"


def _in_python(case: Case, observed: Observed, sizes: Sizes, each: int) -> Verdict | None:
    """Whether Python's own objects hold what should not be there."""
    hidden = each * sizes.total * (sizes.world_size - 1) / sizes.world_size
    for rank, result in enumerate(observed.results):
        if not result["traced"]:
            sentence = f"rank {rank} stopped tracemalloc, which shows what Python's objects hold."
            return wrong("evidence", "state_hidden", sentence, case.tried, "no trace", "tracemalloc left alone")
        most = result["python"]
        if hidden > 2e5 and most > HIDDEN_SHARE * hidden:
            sentence = f"rank {rank} keeps numbers in Python's own objects between steps: state belongs into tensors."
            return wrong("evidence", "state_hidden", sentence, case.tried, f"{most} bytes", "a few thousand")
    return None


# What is sent


def carriers(record: RankRecord, begin: int, end: int) -> list[Any]:
    """Collectives and messages between two events that carry floating-point numbers."""
    return [e for e in record.communications if begin < e.index <= end and "float" in e.dtype]


def elements_sent(events: list[Any]) -> float:
    """Elements that a rank sends, by the stated algorithms of `labkit.cost.traffic`."""
    widths = {"float64": 8, "float32": 4}
    width = lambda e: e.element_bytes if isinstance(e, Collective) else widths.get(e.dtype, 2)  # noqa: E731
    return sum(e.sent_bytes / width(e) for e in events)


def traffic(case: Case, observed: Observed, terms: tuple[int, ...], what: str) -> Verdict | None:
    """Every rank sends (N-1)/N Ψ elements as often as `terms` says, per step, padding counted. what: "2Ψ", say.

    Causes: "all_reduce", "all_gather_gradients", "more_traffic", "less_traffic".
    """
    sizes = sizes_of(case)
    share = (sizes.world_size - 1) / sizes.world_size
    for rank, record in enumerate(observed.records):
        _, steps = training.cuts(record, case.micro)
        for number, (cut, term) in enumerate(zip(steps, terms, strict=True)):
            sent = carriers(record, cut.begin, cut.cleared)
            count = elements_sent(sent)
            got = f"rank {rank}, step {number}: {count:.0f} elements sent"
            wanted = f"{what} (N-1)/N = {term * sizes.total * share:.0f}, padding aside"
            if count > term * sizes.padded * share + SCALARS:
                cause, sentence = why_more(sent, sizes, share, 1)
                return wrong("evidence", cause, sentence, case.tried, got, wanted)
            if count < min(2, term) * sizes.total * share - SCALARS:
                sentence = "the values are right, but too little went through collectives for them."
                return wrong("evidence", "less_traffic", sentence, case.tried, got, wanted)
    return None


def why_more(sent: list[Any], sizes: Sizes, share: float, gathers: int) -> tuple[str, str]:
    """(cause, sentence) for more than is due. gathers: how often all_gather may bring Ψ."""

    def of(op: str) -> float:
        return elements_sent([e for e in sent if e.op == op]) / (sizes.total * share)

    if of("all_reduce") > 0.5:
        sentence = f"all_reduce brings the whole sum to every rank: it sends {of('all_reduce'):.1f}Ψ (N-1)/N alone. "
        return "all_reduce", f"{sentence}A rank needs its own part of the sum, so reduce_scatter."
    if of("all_gather") > gathers + 0.5 and of("reduce_scatter") < 0.5:
        sentence = "every rank gathers all gradients: it needs the sum of its own part alone, so reduce_scatter."
        return "all_gather_gradients", sentence
    if of("all_gather") > gathers + 0.1:
        return "gathered_too_often", f"parameters are gathered {of('all_gather'):.1f} times where {gathers} will do."
    if of("reduce_scatter") > 1.5:
        return "reduced_twice", "gradients are reduced more than once for one backward."
    told = ", ".join(dict.fromkeys(e.op for e in sent))
    return "more_traffic", f"more is sent than gradients to where they are due and parameters back ({told})."
