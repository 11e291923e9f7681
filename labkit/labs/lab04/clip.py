"""Judge of exercise 4.4, `clip_grad_norm`: one norm over the shards of all ranks, one factor for all of them.

Each rank has a list of gradient shards, padding zeros included. Due are the norm before clipping, on every rank the
same float, and shards scaled in place as `torch.nn.utils.clip_grad_norm_` would scale the whole gradient. Evidence:
scalars alone are sent. Where the norm is not finite, it is returned so that the step can be skipped, and the shards do
not matter. Left out: other norms than the 2-norm; a rank without any tensor, which would not know its device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab04.clip_told as told
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import head
from labkit.labs.lab02.accumulate_seen import not_waited

NAME = "clip_grad_norm"
SCALAR_BYTES = 64  # of one call, to every other rank: a number or two, also as float64
MOST_CALLS = 2  # a reduce and a broadcast


@dataclass(frozen=True)
class Ask:
    """One call. shards: by rank, that rank's list of tensors."""

    what: str
    shards: tuple[tuple[Any, ...], ...]
    max_norm: float

    @property
    def norm(self) -> float:
        """The norm of everything, in float64."""
        return math.sqrt(sum(told.squares(mine) for mine in self.shards))

    @property
    def tried(self) -> str:
        dtype = str(self.shards[0][0].dtype).removeprefix("torch.")
        return f"{len(self.shards)} ranks, {self.what}, {dtype}, max_norm={self.max_norm:.4g}"


def judge(fn: Callable, seed: int) -> Verdict:
    """Four ranks with a norm too large and one small enough; then two ranks, then three with odd cases."""
    seen = []
    for asks in _asks(random.Random(seed)):
        n = len(asks[0].shards)
        rank_args = [([(list(ask.shards[rank]), ask.max_norm) for ask in asks],) for rank in range(n)]
        observed = evidence.observe(call, n, args=(fn,), rank_args=rank_args)
        found = _ran(asks, observed) or _waited(asks, observed)
        for number, ask in enumerate(asks):
            found = found or _returned(ask, number, observed) or _scaled(ask, number, observed)
        if found is not None:
            return found
        seen.append((asks, observed))
    for question in (_sent, _honest):
        for asks, observed in seen:
            found = question(asks, observed)
            if found is not None:
                return found
    asks, observed = seen[0]
    most = max(record.sent_bytes for record in observed.records) / len(asks)
    return right(
        f"one norm over the shards of all ranks and one factor for all, on 2, 3 and 4 of them; a rank sends "
        f"{most:.3g} bytes for it"
    )


def _honest(asks: list[Ask], observed: Observed) -> Verdict | None:
    return honest(observed, asks[0].tried)


def _asks(rng: random.Random) -> list[list[Ask]]:
    """By launch. Norms of ranks differ by far, so that one is not taken for another."""
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))

    def drawn(n: int, dtype: str = "float32", scale: float = 1.0, each_has: int = 2) -> tuple[tuple[Any, ...], ...]:
        made = []
        for rank in range(n):
            sizes = rng.sample((5, 7, 11, 17), each_has)
            each = [torch.randn(size, generator=generator) * scale * (1.6 + rank) for size in sizes]
            each[-1][-1] = 0.0  # padding
            made.append(tuple(tensor.to(getattr(torch, dtype)) for tensor in each))
        return tuple(made)

    def ask(what: str, shards: Any, share: float) -> Ask:
        norm = Ask(what, shards, 1.0).norm
        return Ask(what, shards, share * norm if norm else 1.0)

    k = rng.uniform(0.5, 4.0)
    two = ((torch.tensor([3 * k, 4 * k]),), (torch.tensor([12 * k, 0.0]),))
    zeros = tuple(tuple(torch.zeros_like(tensor) for tensor in mine) for mine in drawn(3))
    infinite = drawn(3)
    infinite[rng.randrange(3)][0][1] = math.inf
    return [
        [  # more shards than MOST_CALLS on every rank, the same number: who asks once a shard is told that, and not
            # that ranks' calls differ
            ask("a norm too large", drawn(4, each_has=4), rng.uniform(0.1, 0.3)),
            ask("a norm below max_norm", drawn(4, each_has=3), 2.5),
        ],
        [ask("a norm too large", two, rng.uniform(0.5, 0.9)), ask("gradients of zero", zeros[:2], 1.0)],
        [
            ask("squares beyond the dtype", drawn(3, "float16", 150.0), 0.5),
            Ask("an infinite gradient", infinite, 1.0),
        ],
    ]


def call(fn: Callable, asks: list[tuple[list, float]]) -> Any:
    """Runs in a rank: per call (what came back, the shards afterwards, kinds of shards). Plain values."""
    found = []
    for shards, max_norm in asks:
        own = list(shards)  # whatever fn does to the list
        out = attempts.called(fn, "shards, max_norm", shards, max_norm)
        if attempts.no_result(out):
            return out
        out = float(out) if type(out) is float else None if out is None else kind(out)
        found.append((out, [tensor.detach().clone() for tensor in own]))
    return found


def _ran(asks: list[Ask], observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, asks[0].tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    if failed.cause in ("raised", "died"):
        return failed
    sentence = "ranks do not make the same calls: whether to clip is known only after the norm of all ranks is."
    sentence = f"{sentence} {failed.sentence}"
    return wrong("attempted", "calls_differ", sentence, failed.tried, failed.got, failed.expected)


def _waited(asks: list[Ask], observed: Observed) -> Verdict | None:
    """Before the values, which are wrong or right by luck then."""
    for rank, record in enumerate(observed.records):
        op = not_waited(record) if record is not None else None
        if op is not None:
            sentence = f"with async_op=True {op} returns at once: call wait() before its result is used."
            got = f"rank {rank}: {op} without wait()"
            return wrong("evidence", "not_waited", sentence, asks[0].tried, got, "a wait() for each")
    return None


def _returned(ask: Ask, number: int, observed: Observed) -> Verdict | None:
    outs = [result[number][0] for result in observed.results]
    for rank, out in enumerate(outs):
        if out is None:
            sentence = f"nothing came back on rank {rank}: return the total norm, as a float, on every rank."
            return wrong("shape", "returns_nothing", sentence, ask.tried, "None", "a float")
        if type(out) is not float:
            sentence = f"rank {rank} returned {out}; the norm is a plain number: item() gives it."
            return wrong("shape", "not_a_float", sentence, ask.tried, out, "a float")
    if not math.isfinite(ask.norm):
        for rank, out in enumerate(outs):
            if math.isfinite(out):
                sentence = f"a gradient is infinite, and rank {rank} does not know: its norm is {out:.4g}."
                return wrong("values", "infinity_lost", sentence, ask.tried, f"{out:.6g}", "inf (or nan)")
        return None
    for rank, out in enumerate(outs):
        if not told.near(out, ask.norm, told.tolerance(ask.shards)):
            cause, sentence = told.wrong_norm(ask.shards, ask.max_norm, outs, rank)
            return wrong("values", cause, sentence, ask.tried, f"rank {rank}: {out:.6g}", f"{ask.norm:.6g}")
    return None


def _scaled(ask: Ask, number: int, observed: Observed) -> Verdict | None:
    if not math.isfinite(ask.norm):
        return None
    factor = min(1.0, ask.max_norm / ask.norm) if ask.norm else 1.0
    got = [result[number][1] for result in observed.results]
    for rank, mine in enumerate(ask.shards):
        for place, tensor in enumerate(mine):
            if kind(got[rank][place]) != kind(tensor):
                sentence = f"rank {rank}'s shard {place} has another dtype or shape afterwards: scale it in place."
                return wrong("shape", "wrong_shape", sentence, ask.tried, kind(got[rank][place]), kind(tensor))
            if told.scaled(got[rank][place], tensor, factor):
                continue
            cause, sentence = told.wrong_factor(ask.shards, got, ask.max_norm, rank, place)
            due = head(tensor.double() * factor)
            return wrong("values", cause, sentence, ask.tried, f"rank {rank}: {head(got[rank][place])}", due)
    return None


def _sent(asks: list[Ask], observed: Observed) -> Verdict | None:
    n = observed.world_size
    most = SCALAR_BYTES * len(asks) * (n - 1)
    for rank, record in enumerate(observed.records):
        sent, calls = (record.sent_bytes, len(record.communications)) if record is not None else (0, 0)
        ops = ", ".join(evidence.collectives(observed))
        got = f"rank {rank} sends {sent} bytes in {calls} calls ({ops}) for {len(asks)} norms"
        expected = "one all_reduce of one number a norm"
        shard = min(tensor.nbytes for ask in asks for mine in ask.shards for tensor in mine)
        largest = max((event.num_bytes for event in record.communications), default=0) if record is not None else 0
        if sent > most or largest > max(shard, 16 * n):
            sentence = "whole shards are sent: a shard's share of the norm is one number, the sum of its squares."
            return wrong("evidence", "shards_sent", sentence, asks[0].tried, got, expected)
        if calls > MOST_CALLS * len(asks):
            sentence = "one number a rank is enough: add up all shards' squares first, then ask the other ranks once."
            return wrong("evidence", "many_calls", sentence, asks[0].tried, got, expected)
        if not calls:
            sentence = "the values are right, but no rank was asked for its part: something went another way."
            return honest(observed, asks[0].tried) or wrong(
                "evidence", "no_traffic", sentence, asks[0].tried, got, expected
            )
    return None
