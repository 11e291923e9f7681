"""Judge of exercise 6.4b, `vocab_parallel_cross_entropy`: the loss of logits that no rank has whole.

Three all_reduces of one number per token: the maximum, the sum of exponentials, the target's logit; the gradient of the
rank's own logits then needs nothing more (Megatron-LM, arXiv:1909.08053, section 3). Left out: ignored targets, label
smoothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.entropy_told as entropy_told
import labkit.labs.lab06.functions as functions
import labkit.labs.lab06.seen as seen
import labkit.labs.lab06.told as told
import labkit.labs.lab06.wholes as wholes
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.labs.lab06.functions import Case, Task
from labkit.labs.lab06.told import Due

NAME = "vocab_parallel_cross_entropy"
MOST_CALLS = 3
LARGEST_EXPONENT = 88.0  # exp of more is inf in fp32


def judge(fn: Callable, seed: int) -> Verdict:
    """Two groups of two, then four ranks with logits that overflow where the maximum is not taken off."""
    rng = random.Random(seed)
    found, observed = functions.judged(fn, task(), [_case(rng, 4, 2, 0.0), _case(rng, 4, 4, 150.0)])
    if found is not None:
        return found
    record = observed[-1].records[0]
    calls = record.collectives
    return right(
        f"the loss and its gradient are exact, with {len(calls)} all_reduces of at most "
        f"{max(event.num_bytes for event in calls)} bytes; no rank had the logits whole"
    )


def _case(rng: random.Random, world: int, t: int, offset: float) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    vocab, batch, length = 16 * t * rng.randint(2, 3), 3, rng.randint(4, 6)  # a batch that is no number of ranks
    each = []
    for _ in range(world // t):
        logits = 3 * torch.randn(batch, length, vocab, generator=generator) + offset
        logits += torch.arange(t).repeat_interleave(vocab // t) % 3  # ranges differ in their maxima
        targets = torch.randint(0, vocab, (batch, length), generator=generator)
        rows = vocab // t
        ends = [edge for part in range(t) for edge in (part * rows, (part + 1) * rows - 1)]
        targets.view(-1)[: min(len(ends), targets.numel())] = torch.tensor(ends)[: targets.numel()]
        each.append((logits, targets, torch.tensor(rng.uniform(1.5, 2.5))))
    ask = []
    for rank in range(world):
        logits, targets, gradient = each[rank // t]
        ask.append(((wholes.block(logits, rank % t, t, -1).contiguous(), targets), gradient))
    about = f", all about {offset:g}" if offset else ""
    return Case(f"logits of {vocab} tokens{about}, {batch} x {length} targets", world, t, (tuple(ask),))


def _calls(case: Case, number: int) -> Due:
    import torch
    import torch.nn.functional as F

    t, world = case.t, case.world
    logits, targets = case.inputs(number), case.inputs(number, 1)
    ups = [gradient for _, gradient in case.asks[number]]
    rows, count = logits[0].shape[-1], targets[0].numel()
    whole = [torch.cat(logits[rank // t * t : (rank // t + 1) * t], -1) for rank in range(world)]
    loss = [F.cross_entropy(w.flatten(0, 1), y.flatten()) for w, y in zip(whole, targets, strict=True)]
    soft = [wholes.block(w.softmax(-1), rank % t, t, -1) for rank, w in enumerate(whole)]
    local = [y - rank % t * rows for rank, y in enumerate(targets)]
    hot = [F.one_hot(y, t * rows).float() for y in targets]
    hot = [wholes.block(each, rank % t, t, -1) for rank, each in enumerate(hot)]
    grads = [(p - y) / count * up for p, y, up in zip(soft, hot, ups, strict=True)]
    clamped = [F.one_hot(y.clamp(0, rows - 1), rows).float() for y in local]
    own = [each.softmax(-1) for each in logits]
    scaled = [up / count for up in ups]
    pairs = list(zip(soft, hot, scaled, strict=True))
    of_gradient = told.known(
        entropy_told.SENTENCES,
        ("gradient_summed", [t * each for each in grads]),
        ("target_detached", [p * up for p, _, up in pairs]),
        ("sum_detached", [-y * up for _, y, up in pairs]),
        ("local_softmax", [(mine - y) * up for mine, (_, y, up) in zip(own, pairs, strict=True)]),
        ("target_not_masked", [(p - mine) * up for mine, (p, _, up) in zip(clamped, pairs, strict=True)]),
        ("not_mean", [each * count for each in grads]),
        ("maximum_in_graph", [_through_maximum(each, x) for each, x in zip(grads, logits, strict=True)]),
        ("upstream_ignored", [each / up for each, up in zip(grads, ups, strict=True)]),
    )
    mistakes = {"output": entropy_told.of_loss(logits, targets, t), "input gradient": of_gradient}
    none = {"input gradient": ("no_gradient", "rank {rank}'s logits have no gradient: backward did not reach them.")}
    large = max(float(each.max()) for each in logits) > LARGEST_EXPONENT

    def explain(name: str, got: list) -> tuple[str, str] | None:
        return _not_finite(name, got, large)

    return Due({"output": loss, "input gradient": grads}, mistakes, none, explain)


def _through_maximum(gradient: Any, logits: Any) -> Any:
    """The gradient where the rank's maximum is in the graph: what its logits ask comes off its largest one, too."""
    return gradient.scatter_add(-1, logits.argmax(-1, keepdim=True), -gradient.sum(-1, keepdim=True))


def _not_finite(name: str, got: list, large: bool) -> tuple[str, str] | None:
    """large: whether exponentials of the logits as they are overflow."""
    if all(each.isfinite().all() for each in got):
        return None
    if name != "output":
        sentence = "the loss is finite, its gradient is not: is the maximum in the graph? Take it of logits.detach()."
        return "gradient_not_finite", sentence
    if any((each == -math.inf).any() for each in got):
        sentence = "exponentials underflow, and a log is of 0: more than the maximum is taken off (op=MAX for it?)."
        return "underflow", sentence
    if large:
        return "overflow", "exponentials overflow: take the maximum over all ranks off the logits first."
    sentence = "the loss is not finite, and no exponential overflows here: what is masked adds 0, not -inf."
    return "loss_not_finite", sentence


def _record(case: Case, number: int, rank: int, record: Any, part: seen.Part) -> Verdict | None:
    logits = case.inputs(number)[0]
    token_bytes = 4 * logits[..., 0].numel()
    whole = logits.nbytes * case.t
    forward, backward = (seen.between(record, *ends) for ends in ((part.begin, part.middle), (part.middle, part.end)))
    wanted = f"forward 3 all_reduces of {token_bytes} bytes, backward nothing"
    got = f"rank {rank}: forward {seen.words(forward)}; backward {seen.words(backward)}"

    def failing(cause: str, sentence: str) -> Verdict:
        return wrong("evidence", cause, sentence, case.tried, got, wanted)

    if any(event.num_bytes > 2 * token_bytes * max(2, case.t) for event in (*forward, *backward)):
        return failing("logits_gathered", "more than one number per token is sent: logits stay where they are.")
    if case.t == 4 and seen.largest_made(record, part.begin, part.end) >= whole:
        sentence = "a tensor as large as the whole logits was made: with [b, s, vocab / t] all can be done."
        return wrong("evidence", "full_logits", sentence, case.tried, f"rank {rank}", f"less than {whole} bytes")
    if any(event.op != "all_reduce" for event in (*forward, *backward)):
        return failing("other_call", "a sum or a maximum per token is all that is needed: all_reduce does it.")
    if backward:
        return failing("backward_call", "backward communicates: all that the rank's gradient needs is known by then.")
    if len(forward) > MOST_CALLS:
        return failing("too_many_calls", f"{len(forward)} calls: maximum, sum and the target's logit are three.")
    if len(forward) < 2:
        return failing("missing_call", "the loss is right, but what it needs of others did not come by all_reduce.")
    return None


def _failed(case: Case, observed: Observed, failed: Verdict) -> tuple[str, str] | None:
    if "IndexError" in failed.sentence or "out of bounds" in failed.sentence or "out of range" in failed.sentence:
        return "out_of_range", "a target of another rank's range is looked up as it is: the rank has no such logit."
    return None


def task() -> Task:
    """What the exercise demands."""
    return Task(NAME, "logits, targets, group", _calls, _record, failed=_failed)
