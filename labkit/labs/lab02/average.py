"""Judge of exercise 2.1, `average_gradients`: every gradient becomes its mean over all ranks.

Backward has run on every rank, each on a batch of its own, when the function is called. What it leaves in `.grad` is
compared with the mean of what backward had left, to rounding. By which calls is not graded: one blocking all_reduce per
parameter will do, and what was used is told on a pass. But whatever was sent must be waited for, and the gradients must
have gone through the group. Left out: buckets (2.2).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import labkit.labs.lab02.average_told as told
import labkit.labs.lab02.average_waits as waits
import labkit.labs.lab02.models as models
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import head, same

NAME = "average_gradients"
LEAST = 0.95  # of the bytes due: an algorithm's chunks need not be equal


@dataclass(frozen=True)
class Case:
    """One call. what: what is special about it. seeds: of the modules, by rank. batches: by rank,
    (x, branches to use, targets).
    """

    what: str
    plan: models.Plan
    seeds: tuple[int, ...]
    batches: tuple[tuple[Any, Any, Any], ...]

    @property
    def world_size(self) -> int:
        return len(self.seeds)

    @property
    def tried(self) -> str:
        return f"world_size={self.world_size}, {models.describe(self.plan)}"


def judge(fn: Callable, seed: int) -> Verdict:
    """Four ranks and a plain model first, then other world sizes, frozen layers, and layers without a gradient."""
    seen = []
    for case in _cases(random.Random(seed)):
        observed = _observe(fn, case)
        found = _ran(fn, case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for case, observed in seen:
        found = honest(observed, case.tried) or _waited(case, observed, "evidence") or _traffic(case, observed)
        if found is not None:
            return found
    case, observed = seen[0]
    record = observed.records[0]
    num_bytes = sum(each.nbytes for each in _own(case, 0)[1].values())
    return right(
        f"every gradient is the mean over the ranks, on 2, 3 and 4 of them, also where some have none; on "
        f"{case.world_size} ranks each sent {record.sent_bytes / num_bytes:.3g} times the gradients' bytes, in "
        f"{len(record.communications)} call{'s' * (len(record.communications) != 1)}"
    )


def _observe(fn: Callable, case: Case) -> Observed:
    rank_args = [(case.plan, *each) for each in zip(case.seeds, case.batches, strict=True)]
    return evidence.observe(call, case.world_size, args=(fn,), rank_args=rank_args)


def _cases(rng: random.Random) -> list[Case]:
    a, b, c, d = (2 * rng.randint(low, low + 4) + 1 for low in (3, 9, 14, 1))
    return [
        _case(rng, "plain", models.Plan(widths=(a, b, c, d), dtype="float64"), 4),
        _case(rng, "other size", models.Plan(widths=(a, c, d)), 3),
        _case(rng, "frozen", models.Plan(widths=(a, b, c, d), frozen=(1,), tied=False, dtype="float64"), 2),
        _case(rng, "unused", models.Plan(widths=(a, b, d), branches=4, dtype="float64"), 3),
    ]


def _case(rng: random.Random, what: str, plan: models.Plan, world_size: int) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    wide = getattr(torch, plan.dtype)
    batches = tuple(
        (
            torch.randn(5, plan.widths[0], generator=generator, dtype=wide),
            torch.tensor(used, dtype=torch.int64),
            torch.randn(5, plan.widths[-1], generator=generator, dtype=wide),
        )
        for used in models.branches_used(rng, plan.branches, world_size)
    )
    return Case(what, plan, tuple(rng.sample(range(2**30), world_size)), batches)


def _backward(plan: models.Plan, seed: int, batch: tuple) -> Any:
    """A module after its backward. The first frozen parameter carries a gradient of before it was frozen."""
    import torch

    module = models.build(plan, seed)
    x, used, targets = batch
    models.loss_of(module(x, used), targets).backward()
    for parameter in [each for each in module.parameters() if not each.requires_grad][:1]:
        parameter.grad = torch.full_like(parameter, 1.0 + seed % 97)
    return module


def call(fn: Callable, plan: models.Plan, seed: int, batch: tuple) -> Any:
    """Runs in a rank: parameters and gradients after fn, by name, and `early` of `average_waits.noted`."""
    import torch
    import torch.distributed as dist

    from labkit.check.stubs import is_stub

    if is_stub(fn):
        return NotImplemented
    # Ranks are forked alike: without this, a set of parameters would have one order on all.
    apart = [torch.nn.Parameter(torch.empty(0)) for _ in range(17 * dist.get_rank())]
    module = _backward(plan, seed, batch)
    named = dict(module.named_parameters())  # those that backward met, whatever fn does to the module
    with waits.noted() as early:
        out = attempts.called(fn, "model", module)
        used = early()
    if attempts.no_result(out) and getattr(out, "cause", "") != "wrong_type":  # what it returns does not matter
        return out
    del apart
    parameters = {name: each.detach() for name, each in named.items()}
    return {"parameters": parameters, "grads": {name: each.grad for name, each in named.items()}, "early": used}


def _own(case: Case, rank: int) -> tuple[Any, dict[str, Any]]:
    """A rank's module, and its gradients by name, as backward leaves them."""
    with models.one_thread():
        module = _backward(case.plan, case.seeds[rank], case.batches[rank])
    return module, {name: each.grad for name, each in module.named_parameters()}


def _ran(fn: Callable, case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    found = _why(fn, case, _differing(observed))
    if found is None:
        return failed
    return wrong("attempted", found[0], f"{found[1]} {failed.sentence}", case.tried, failed.got, failed.expected)


def _why(fn: Callable, case: Case, calls: list[Any]) -> tuple[str, str] | None:
    """(cause, sentence) of a failure that this exercise knows. calls: the first that differ, one a rank, or none."""
    one_op = len({each.op for each in calls}) == 1
    if case.what == "unused" and one_op and len({math.prod(each.shape) for each in calls}) == 1:
        other = "dtype" if len({each.dtype for each in calls}) > 1 else "shape"
        sentence = f"ranks without a gradient join with zeros of another {other}; torch.zeros_like(parameter) has its."
        return "wrong_zeros", sentence
    easier = _easier(case)
    if easier is not None and attempts.ran(_observe(fn, easier), NAME, case.tried) is None:
        if case.what == "frozen":
            return "frozen", "it works while all parameters train: leave out those with requires_grad False."
        return "no_gradient", (
            "it works while every parameter has a gradient. Here some have none (None) on some ranks: those must join "
            "the all_reduce with zeros, or the other ranks meet the wrong call."
        )
    shapes = {tuple(each.shape) for each in models.build(case.plan, 0).parameters()}
    if one_op and {tuple(each.shape) for each in calls} <= shapes:
        return "order", (
            "ranks take parameters in different orders: model.parameters() has one order on all, a set has not."
        )
    return None


def _easier(case: Case) -> Case | None:
    """The same case without what is special about it: what fails here too has another cause. None for a plain one."""
    import torch

    if case.what == "frozen":
        return replace(case, plan=replace(case.plan, frozen=()))
    if case.what == "unused":
        every = torch.arange(case.plan.branches)
        return replace(case, batches=tuple((x, every, targets) for x, _, targets in case.batches))
    return None


def _differing(observed: Observed) -> list[Any]:
    """By rank, the first collective of the whole group in which ranks differ, from the ledgers; [] where none does."""
    every = [
        [entry for entry in ledger if entry.op not in evidence.P2P and len(entry.ranks) == observed.world_size]
        for ledger in observed.outcome.ledgers
    ]
    for at_once in itertools.zip_longest(*every):
        calls = [each for each in at_once if each is not None]  # some ranks may not have come so far
        if len({(each.op, each.shape, each.dtype, each.root, each.reduce_op) for each in calls}) > 1:
            return calls
    return []


def _values(case: Case, observed: Observed) -> Verdict | None:
    modules, own = zip(*(_own(case, rank) for rank in range(case.world_size)), strict=True)
    trained = [name for name, each in modules[0].named_parameters() if each.requires_grad]
    got = [result["grads"] for result in observed.results]
    mean = {name: _mean([grads[name] for grads in own]) for name in trained}
    for question in (_parameters_kept, _frozen_kept, _shapes):
        found = question(case, observed, modules, own, mean)
        if found is not None:
            return found
    averaged = told.Averaged([{name: grads[name] for name in trained} for grads in own], got, mean)
    raced = _waited(case, observed, "values") if averaged.wrong else None
    if raced is not None:
        return raced
    for rank, name in averaged.wrong:
        cause, sentence = told.wrong_gradients(averaged) or (
            "wrong_values",
            f"rank {rank} does not hold the mean of {name}'s gradients over all ranks.",
        )
        held = "None" if got[rank][name] is None else head(got[rank][name])
        due = "None" if mean[name] is None else head(mean[name])
        if held == due:  # to the digits shown
            off = float((got[rank][name] - mean[name]).abs().max() / mean[name].abs().max())
            held += f", off by {off:.1g} of the largest"
        return wrong("values", cause, sentence, case.tried, f"rank {rank}, {name}: {held}", due)
    return None


def _mean(grads: list) -> Any:
    """The mean over ranks; a rank without a gradient counts as zero. None if none has one."""
    present = [grad for grad in grads if grad is not None]
    return sum(present) / len(grads) if present else None


def _parameters_kept(case: Case, observed: Observed, modules: tuple, own: tuple, mean: dict) -> Verdict | None:
    for rank, result in enumerate(observed.results):
        for name, value in result["parameters"].items():
            everyone = [dict(module.named_parameters())[name].detach() for module in modules]
            if same(value, everyone[rank]):
                continue
            average = sum(everyone) / case.world_size
            cause, sentence = "parameters_changed", f"rank {rank}'s parameter {name} was changed: leave it as it is."
            if told.close(value, average):
                cause = "averages_parameters"
                sentence = "the parameters were averaged, and the gradients are what this is about: use `.grad`."
            return wrong("values", cause, sentence, case.tried, head(value), head(everyone[rank]))
    return None


def _frozen_kept(case: Case, observed: Observed, modules: tuple, own: tuple, mean: dict) -> Verdict | None:
    for rank, result in enumerate(observed.results):
        for name, value in result["grads"].items():
            if name not in mean and not _kept(value, own[rank][name]):
                due = own[rank][name]
                had = "has no `.grad`" if due is None else "its `.grad` is left from before it was frozen"
                sentence = f"{name} is frozen (requires_grad is False) and {had}: leave that as it is."
                held, due = ("None" if each is None else head(each) for each in (value, due))
                return wrong("values", "frozen", sentence, case.tried, f"rank {rank}: {held}", due)
    return None


def _kept(value: Any, before: Any) -> bool:
    return value is before if value is None or before is None else same(value, before)


def _shapes(case: Case, observed: Observed, modules: tuple, own: tuple, mean: dict) -> Verdict | None:
    for rank, result in enumerate(observed.results):
        for name, due in mean.items():
            held = result["grads"].get(name)
            if held is None and due is not None:
                mine = own[rank][name] is None
                cause = "no_gradient" if mine else "gradient_lost"
                sentence = f"rank {rank} has no gradient for {name} afterwards, and other ranks made one: zeros count."
                if not mine:
                    sentence = f"rank {rank}'s gradient of {name} is gone: leave the mean in `.grad`."
                return wrong("values", cause, sentence, case.tried, "None", head(due))
            if held is not None and due is not None and kind(held) != kind(due):
                sentence = f"rank {rank}'s `.grad` of {name} has another type or shape than the parameter."
                return wrong("shape", "wrong_shape", sentence, case.tried, kind(held), kind(due))
    return None


def _waited(case: Case, observed: Observed, stage: str) -> Verdict | None:
    """Everything sent was waited for. Cause "not_waited"; values that are right all the same came by luck."""
    found = waits.not_waited(observed)
    if found is None:
        return None
    rank, op, used = found
    what = "its result is used before it is there" if used else "nothing waits for it"
    sentence = f"with async_op=True {op} returns at once, and {what}: call wait() on what it returns."
    if stage == "evidence":
        sentence += " The values came in time by luck."
    got = f"rank {rank}: {op} {'used' if used else 'left'} without a wait"
    return wrong(stage, "not_waited", sentence, case.tried, got, "every communication waited for")


def _traffic(case: Case, observed: Observed) -> Verdict | None:
    """Each rank sent its gradients, and received those that others have, by any calls. Cause "no_traffic".

    By the record and, where the system tells, by the rank's sockets.
    """
    every = [_own(case, rank) for rank in range(case.world_size)]
    frozen = {name for name, each in every[0][0].named_parameters() if not each.requires_grad}
    sizes = [{n: g.nbytes for n, g in own.items() if g is not None and n not in frozen} for _, own in every]
    for rank, record in enumerate(observed.records):
        others = {name: size for each in sizes if each is not sizes[rank] for name, size in each.items()}
        moved = [(record.sent_bytes, record.received_bytes)]
        if observed.outcome.socket_bytes is not None and observed.outcome.backend == "gloo":
            moved.append((observed.outcome.socket_bytes[rank].sent, observed.outcome.socket_bytes[rank].received))
        for verb, due, each in zip(("sent", "received"), (sizes[rank], others), zip(*moved, strict=True), strict=True):
            needed = sum(due.values())
            if min(each) < LEAST * needed:
                sentence = f"rank {rank} has the mean, but too few bytes for it went through the group."
                got, expected = f"{min(each)} bytes {verb}", f"at least {needed}"
                return wrong("evidence", "no_traffic", sentence, case.tried, got, expected)
    return None
