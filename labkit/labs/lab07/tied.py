"""Judge of exercise 7.4, `sum_tied`: one weight at both ends of a pipeline, whose gradients must be added up.

Values: afterwards both ends have the sum, the weight itself is as it was. Evidence: the two ends send one gradient each
(by ring an all_reduce of two ranks does), the ranks between them nothing; a group is made by all ranks, as torch asks:
gloo does not mind when two do it alone, but the next group has another name on them. Left out: how the two copies
become equal before the first step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import labkit.labs.lab03.own_work as own_work
import labkit.labs.lab07.messages as messages
from labkit.check import evidence
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.attempts import Unusable

NAME = "sum_tied"
SMALL = 256  # bytes that a rank may send beside: flags, a barrier


@dataclass(frozen=True)
class Case:
    """weight: the same at both ends. gradients: of the first and of the last rank."""

    ranks: int
    weight: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor]
    tried: str

    @property
    def rank_args(self) -> list[tuple]:
        found: list[tuple] = [(None, None)] * self.ranks
        found[0], found[-1] = (self.weight, self.gradients[0]), (self.weight, self.gradients[1])
        return found


def judge(fn: Callable, seed: int) -> Verdict:
    """Four ranks, of which two have the weight; then two ranks."""
    rng = random.Random(seed)
    for ranks in (4, 2):
        case = draw(rng, ranks)
        observed = evidence.observe(call, ranks, args=(fn,), rank_args=case.rank_args, deadline_s=60.0)
        found = _ran(case, observed) or messages.changed_under_way(observed, case.tried) or _values(case, observed)
        found = found or _traffic(case, observed) or _groups(case, observed) or honest(observed, case.tried)
        if found is not None:
            return found
    return right("both ends have the sum, sent once each way, and the ranks between them send nothing")


def draw(rng: random.Random, ranks: int) -> Case:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = (rng.randint(30, 60), rng.randint(9, 17))
    weight, one, other = (torch.randn(shape, generator=generator) for _ in range(3))
    tried = f"{NAME}(weight) on {ranks} ranks, a weight of shape {shape} on the first and the last"
    return Case(ranks, weight, (one, other), tried)


def call(fn: Callable, weight: torch.Tensor | None, gradient: torch.Tensor | None) -> Any:
    """Runs in a rank: (whether the weight is as it was, its gradient, how many groups were made for all ranks); True
    and None in the middle."""
    found = own_work.borrowed(fn, ("labkit.model",))
    if found:
        return Unusable("ready_made", own_work.verdict(found, "").sentence)
    parameter = None
    if weight is not None:
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient.clone()
    before = _named_groups()
    out = attempts.called(fn, "weight", parameter)
    if attempts.no_result(out):
        return out
    made = _named_groups() - before
    if parameter is None:
        return True, None, made
    after = parameter.grad
    return bool(parameter.detach().equal(weight)), None if after is None else after.detach().clone(), made


def _named_groups() -> int:
    """torch's count of groups, which names them: one more in every rank that calls new_group, member or not, unless
    use_local_synchronization is set. It is torch's own business: where it is gone, 0, and the question is not asked."""
    return getattr(getattr(dist.distributed_c10d, "_world", None), "group_count", 0)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    found = attempts.ran(observed, NAME, case.tried)
    if found is None or found.cause in attempts.CAUSES:
        return found
    if "'grad'" in found.sentence and "NoneType" in found.sentence:
        sentence = f"on the ranks between the ends weight is None: nothing to send there. {found.sentence}"
        return wrong("attempted", "middle_ranks", sentence, found.tried, found.got, found.expected)
    return found


def _values(case: Case, observed: Observed) -> Verdict | None:
    one, other = case.gradients
    ends = {0: observed.results[0], case.ranks - 1: observed.results[-1]}
    for rank, (kept, got, _) in ends.items():
        if not kept:
            sentence = f"the weight of rank {rank} has changed: its gradient is to be summed, the weight stays."
            return wrong("values", "weight_changed", sentence, case.tried, "another weight", "the weight as it was")
        if got is None:
            return wrong("values", "no_gradient", f"`.grad` of rank {rank} is None now.", case.tried, None, "the sum")
    if all(_same(end[1], one + other) for end in ends.values()):
        return None
    rank, got = next((rank, end[1]) for rank, end in ends.items() if not _same(end[1], one + other))
    found = messages.used_too_soon(observed, case.tried)
    if found is not None:
        return found
    cause, sentence = _known([end[1] for end in ends.values()], case, rank)
    if cause == "not_summed" and evidence.sent_bytes(observed)[rank] + len(evidence.collectives(observed)):
        sentence += " What the other one has sent must end up in `.grad` itself: nobody looks at what is returned."
    numbers = [f"{float(each.flatten()[0]):.6g}" if each.numel() else "empty" for each in (got, one + other)]
    return wrong("values", cause, sentence, case.tried, f"rank {rank}: {numbers[0]}, ...", f"{numbers[1]}, ...")


def _known(got: list[torch.Tensor], case: Case, rank: int) -> tuple[str, str]:
    one, other = case.gradients
    whole = one + other
    if _same(got[0], one) and _same(got[1], other):
        return "not_summed", "both ends still have their own part of the gradient."
    if all(_same(each, whole / 2) for each in got):
        return "averaged", "this is the mean: the weight is used at both ends, so its gradient is the sum of both."
    if _same(got[0], whole) or _same(got[1], whole):
        return "one_sided", f"one end has the sum and rank {rank} has not: after a step the two copies would differ."
    if all(_same(each, one) for each in got) or all(_same(each, other) for each in got):
        return "overwritten", "both ends have the gradient of one of them: the other's part is lost."
    if _same(got[0], other) and _same(got[1], one):
        return "swapped", "the ends have swapped their gradients: add what comes to what is there."
    if _same(got[0], whole + one) and _same(got[1], whole + other):
        return "wrong_sum", "each end's own part is in it twice: what came was the sum already."
    if _same(got[0], one + case.weight) and _same(got[1], other + case.weight):
        return "wrong_sum", "what was sent and added is the weight itself: send its `.grad`."
    return "wrong_sum", "this is not the sum of the two ends' gradients."


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-5, atol=1e-6))


def _traffic(case: Case, observed: Observed) -> Verdict | None:
    size = case.weight.numel() * 4
    sent = [sum(event.sent_bytes for event in record.communications) for record in observed.records]
    for rank in range(1, case.ranks - 1):
        if sent[rank] > SMALL:
            sentence = f"rank {rank} sends, but has no part of this gradient: let the two ends talk alone."
            return wrong("evidence", "middle_ranks", sentence, case.tried, f"{sent[rank]} bytes", "none")
    for rank in (0, case.ranks - 1):
        if sent[rank] > size + SMALL:
            sentence = f"rank {rank} sends more than its own gradient once."
            return wrong("evidence", "more_traffic", sentence, case.tried, f"{sent[rank]} bytes", f"{size} bytes")
    found = attempts.never_waited(observed)
    if found is None:
        return attempts.all_waited(observed, case.tried)
    sentence = f"rank {found[0]} never waits for its i{found[1]}: before wait() nothing says that it is over."
    return wrong("evidence", "not_waited", sentence, case.tried, f"an i{found[1]} without wait()", "all waited for")


def _groups(case: Case, observed: Observed) -> Verdict | None:
    """Cause "new_group_alone": some ranks made a group, and others, which torch asks to call new_group, too, did not.
    The values are right, for gloo lets the two connect alone."""
    made = [result[2] for result in observed.results]
    if len(set(made)) == 1:
        return None
    rank = made.index(min(made))
    sentence = (
        f"rank {rank} does not call new_group: all ranks must, also those that are not in the group, or the next group "
        "has another name on them and nobody finds it. Call it before a rank returns, or exchange messages instead."
    )
    return wrong("evidence", "new_group_alone", sentence, case.tried, f"calls by rank: {made}", "as many on each")
