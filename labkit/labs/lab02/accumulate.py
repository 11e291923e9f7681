"""Judge of exercise 2.3, `accumulate`: many small backwards, one sum over ranks, the mean over all counted tokens.

The gradient due is that of one batch of everything: the sum of all tokens' losses over their number, of all
microbatches of all ranks. The parent works it out serially, one microbatch at a time, from inputs drawn after the
answer was sealed. Evidence, from the ranks' records: bytes sent (one gradient, by ring 2(n-1)/n of it, and some
scalars), FLOPs (a rank's own microbatches, one checkpointed forward more allowed), bytes held (one microbatch's graph
at a time), waits. At the call every `.grad` is None. Left out: when the gradient is communicated, during the last
backward or after it; a group that is destroyed after the last call, which harms nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab02.accumulate_seen as seen_in
import labkit.labs.lab02.accumulate_told as told
import labkit.labs.lab02.models as models
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab02.accumulate_cases import IGNORED, MANY, SHAPE, Case, cases, model
from labkit.labs.lab02.accumulate_told import Part

NAME = "accumulate"
# Of a tensor's largest element. Rounding of fp32 sums in another order stays below a tenth of it, a mean of means is
# off by fifty times as much and more; a test tries both.
TOLERANCE = 2e-4


def judge(fn: Callable, seed: int) -> Verdict:
    """Two ranks with twelve microbatches each; then numbers that differ, a rank with none, one rank alone."""
    seen = []
    for case in cases(random.Random(seed)):
        parts = serial(case)
        observed = evidence.observe(call, case.world_size, args=(fn, case.weights), rank_args=_rank_args(case))
        found = _ran(case, observed) or _returned(case, observed) or _waited(case, observed)
        found = found or _values(case, parts, observed)
        if found is not None:
            return found
        seen.append((case, parts, observed))
    for question in (_own_work, _communicated, _one_graph):
        for case, parts, observed in seen:
            found = question(case, parts, observed)
            if found is not None:
                return found
    for case, _, observed in seen:
        found = honest(observed, case.tried)
        if found is not None:
            return found
    case, _, observed = seen[0]
    return right(
        f"the gradient of one batch of {sum(map(sum, case.counts))} tokens, from {len(case.batches[0])} microbatches "
        f"on each of {case.world_size} ranks, communicated once; a rank without microbatches takes part"
    )


def _rank_args(case: Case) -> list[tuple]:
    return [(list(mine),) for mine in case.batches]


def serial(case: Case) -> list[list[Part]]:
    """Per rank and microbatch what it adds to the whole, worked out here, one after another."""
    with models.one_thread():
        return _serial(case)


def _serial(case: Case) -> list[list[Part]]:
    import torch
    import torch.nn.functional as F

    found = []
    for mine in case.batches:
        found.append([])
        for tokens, targets in mine:
            trained = model(case.weights)
            with torch.enable_grad():
                logits = trained(tokens).flatten(0, 1)
                loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
                loss.backward()
            gradient = {name: parameter.grad.double() for name, parameter in trained.named_parameters()}
            count = int((targets != IGNORED).sum())
            found[-1].append(Part(count, targets.numel(), loss.item(), gradient, _flops(tokens)))
    return found


def _flops(tokens: Any) -> int:
    """Of a forward and its backward: 6 per weight and token. The record has none for attention on a CPU."""
    h = SHAPE["hidden"]
    heads = 2 * h * h + 2 * h * h * SHAPE["kv_heads"] // SHAPE["heads"]
    weights = SHAPE["layers"] * (heads + 3 * h * SHAPE["ffn"]) + 256 * h
    return 6 * weights * tokens.numel()


def call(fn: Callable, weights: dict[str, Any], microbatches: list[tuple[Any, Any]]) -> Any:
    """Runs in a rank: (what came back, gradients by name, names of changed parameters, whether it uses futures).

    The parameters are asked for before the call: afterwards the model may be another. What is no float comes back as
    its kind, in words.
    """
    import torch

    trained = model(weights)
    own = dict(trained.named_parameters())
    out = attempts.called(fn, "model, microbatches", trained, microbatches)
    if attempts.no_result(out):
        return out
    grads = {name: None if p.grad is None else p.grad.detach().clone() for name, p in own.items()}
    now = dict(torch.nn.Module.named_parameters(trained))
    changed = [name for name, p in own.items() if now.get(name) is not p or not _same(p.detach(), weights[name])]
    out = float(out) if isinstance(out, float) else None if out is None else kind(out)
    return out, grads, changed, seen_in.uses(fn, "get_future")


def _same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and bool(one.equal(other))


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    none = next((rank for rank, mine in enumerate(case.batches) if not mine), None)
    reduced = [seen_in.ledger_bytes(ledger) for ledger in observed.outcome.ledgers]
    if failed.cause == "raised":
        if none is None or observed.outcome.cause.rank != none:
            return failed
        cause, sentence = "no_microbatch", f"rank {none} has no microbatch, and must take part all the same."
    elif max(reduced) > case.gradient_bytes + seen_in.SCALAR_BYTES and case.world_size > 2:
        cause, sentence = "every_microbatch", (
            "gradients are communicated in every microbatch, and ranks have different numbers of them: once, at the "
            "end, is enough."
        )
    elif none is not None:
        cause, sentence = "no_microbatch", f"rank {none} has no microbatch, but its zeros belong to every sum."
    elif len(set(map(len, case.batches))) > 1:
        cause, sentence = "uneven_numbers", (
            "ranks have different numbers of microbatches: what they communicate must not depend on the number."
        )
    else:
        return failed
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _returned(case: Case, observed: Observed) -> Verdict | None:
    for rank, (out, grads, changed, _) in enumerate(observed.results):
        if out is None:
            sentence = f"nothing came back on rank {rank}: return the mean loss, on every rank."
            return wrong("shape", "returns_nothing", sentence, case.tried, "None", "a float")
        if type(out) is not float:
            sentence = f"rank {rank} returned {out}; the mean loss is a plain number: item() gives it."
            return wrong("shape", "not_a_float", sentence, case.tried, out, "a float")
        if grads.keys() != case.weights.keys():
            sentence = f"rank {rank} has gradients of other parameters than the model's."
            return wrong("shape", "no_gradient", sentence, case.tried, ", ".join(grads), ", ".join(case.weights))
        if changed:
            sentence = f"rank {rank} changed {changed[0]}: the optimizer's step comes after, not within."
            return wrong("values", "parameters_changed", sentence, case.tried, f"another {changed[0]}", "the same")
        missing = [name for name, grad in grads.items() if grad is None]
        if missing:
            sentence = f"rank {rank} has no gradient of {missing[0]}: .grad is None there after the call."
            return wrong("shape", "no_gradient", sentence, case.tried, "None", f"a gradient for {missing[0]}")
        for name, grad in grads.items():
            if kind(grad) != kind(case.weights[name]):
                sentence = f"rank {rank} has a gradient of {name} of another type or shape."
                return wrong("shape", "wrong_shape", sentence, case.tried, kind(grad), kind(case.weights[name]))
    return None


def _values(case: Case, parts: list[list[Part]], observed: Observed) -> Verdict | None:
    due = told.mean_gradient(parts)
    for rank, (_, grads, _, _) in enumerate(observed.results):
        for name, grad in grads.items():
            found = told.apart(grad, due[name], TOLERANCE)
            if found is not None:
                cause, sentence = told.wrong_gradient(parts, [each[1] for each in observed.results], rank)
                cause, sentence = seen_in.explained(cause, sentence, observed.records[rank], case.gradient_bytes)
                got, expected = found
                got = f"rank {rank}, {name}: {got}"
                return wrong("values", cause, sentence, case.tried, got, expected)
    loss = told.mean_loss(parts)
    for rank, (out, _, _, _) in enumerate(observed.results):
        if not told.near(out, loss, TOLERANCE):
            cause, sentence = told.wrong_loss(parts, out, rank)
            sentence = f"the gradient is right, the loss that rank {rank} returns is not: {sentence}"
            return wrong("values", cause, sentence, case.tried, f"rank {rank}: {out:.6g}", f"{loss:.6g} nats per token")
    return None


def _waited(case: Case, observed: Observed) -> Verdict | None:
    """Before the values, which are wrong or right by luck then. A future's own wait is not seen, and is believed."""
    for rank, ((*_, futures), record) in enumerate(zip(observed.results, observed.records, strict=True)):
        op = seen_in.not_waited(record) if record is not None and not futures else None
        if op is not None:
            sentence = f"{op} was started with async_op=True, and its result used before wait(): wait for every one."
            expected = "a wait() for each"
            return wrong("evidence", "not_waited", sentence, case.tried, f"rank {rank}: {op} without wait()", expected)
    return None


def _communicated(case: Case, parts: list[list[Part]], observed: Observed) -> Verdict | None:
    n = case.world_size
    share = 2 * (n - 1) / n
    ops = evidence.collectives(observed)
    for rank, record in enumerate(observed.records):
        sent = _sent(record)
        due = seen_in.due_bytes(record, case.gradient_bytes, n)
        got = f"rank {rank} sends {sent / case.gradient_bytes:.3g} gradients ({', '.join(ops)})"
        expected = f"{share:.3g}, as an all_reduce of one gradient does, and a few scalars"
        if sent > due + _scalars(case):
            cause, sentence = seen_in.too_much(record, case.gradient_bytes, len(case.batches[rank]), sent - due)
            return wrong("evidence", cause, sentence, case.tried, got, expected)
        gathered = seen_in.gathered_by_one(record, case.gradient_bytes)
        if gathered is not None:
            return wrong("evidence", *gathered, case.tried, got, expected)
        if sent < min(share, 1) * case.gradient_bytes * 0.99:  # a reduce and a broadcast send one gradient
            sentence = "the values are right, but too few bytes for them were sent: something went another way."
            return honest(observed, case.tried) or wrong("evidence", "no_traffic", sentence, case.tried, got, expected)
    return None


def _sent(record: Any) -> int:
    return sum(event.sent_bytes for event in record.communications) if record is not None else 0


def _scalars(case: Case) -> int:
    """Bytes that a rank may send beside the gradient: some numbers, also as objects for every other rank."""
    return seen_in.SCALAR_BYTES * max(1, case.world_size - 1)


def _own_work(case: Case, parts: list[list[Part]], observed: Observed) -> Verdict | None:
    """A rank computes its own microbatches. One forward more each is allowed for checkpointing, one to look at the
    loss, and one microbatch for zeros. Others' tokens can only have come where more than gradients and scalars did.
    """
    largest = max(part.flops for mine in parts for part in mine)
    bounds = case.gradient_bytes, case.world_size, _scalars(case)
    more = any(record is None or seen_in.more_than_sums(record, *bounds) for record in observed.records)
    for rank, (mine, record) in enumerate(zip(parts, observed.records, strict=True)):
        own = sum(part.flops for part in mine)
        done = record.flops if record is not None else 0
        if done > 1.75 * own + largest:
            cause, sentence = "work_repeated", (
                f"rank {rank} computes {done / max(1, own):.2g} times what its microbatches need: one forward and one "
                "backward each."
            )
            if more:
                cause = "work_of_others"
                sentence = f"rank {rank} computes microbatches of other ranks: each is to compute its own."
            got, expected = f"{done / 1e6:.3g} MFLOPs", f"{own / 1e6:.3g} MFLOPs"
            return wrong("evidence", cause, sentence, case.tried, got, expected)
    return None


def _one_graph(case: Case, parts: list[list[Part]], observed: Observed) -> Verdict | None:
    for rank, (mine, record) in enumerate(zip(case.batches, observed.records, strict=True)):
        if record is None or not mine:
            continue
        tokens = max(each.numel() for each, _ in mine)
        found = seen_in.all_at_once(record, tokens, SHAPE["hidden"])
        if found is None and len(mine) == MANY:
            found = seen_in.graphs_kept(record, case.gradient_bytes, tokens)
        if found is not None:
            cause, sentence, got, expected = found
            return wrong("evidence", cause, sentence, case.tried, f"rank {rank}: {got}", expected)
    return None
