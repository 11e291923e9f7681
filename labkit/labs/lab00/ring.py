"""Judge of exercise 0.3, `ring_exchange`: to the right neighbour, from the left, never a deadlock.

Gloo's send returns only once the peer has posted its recv, at any size, so an answer that can hang hangs here
every time. One that passes one message after another is slow and right: it passes, and is told its rounds.
Left out: rings of pieces, the subject of lab 01.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab00.attempts as attempts
import labkit.labs.lab00.inputs as inputs
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest

NAME = "ring_exchange"
_ALONE = "it is its own left neighbour, so return a clone of its tensor"


@dataclass(frozen=True)
class Case:
    """One call: the tensors that went in, by rank."""

    tensors: tuple[Any, ...]

    @property
    def world_size(self) -> int:
        return len(self.tensors)

    @property
    def tried(self) -> str:
        return f"world_size={self.world_size}, {inputs.describe(self.tensors[0])}"

    def left_of(self, rank: int) -> Any:
        return self.tensors[(rank - 1) % self.world_size]


def judge(fn: Callable, seed: int) -> Verdict:
    """Even rings first, then odd ones, then a single rank; one input is larger than any socket buffer."""
    seen = []
    for case in _cases(random.Random(seed)):
        observed = evidence.observe(call, case.world_size, rank_args=[(t,) for t in case.tensors], args=(fn,))
        found = _ran(case, observed) or _returned(case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for case, observed in seen:
        found = _how(case, observed)
        if found is not None:
            return found
    rounds = {case.world_size: evidence.timeline(observed).rounds for case, observed in seen}
    told = ", ".join(f"{count:g} on {size}" for size, count in sorted(rounds.items()) if size > 1)
    return right(f"cannot hang, on odd rings either; rounds taken: {told} ranks")


def _cases(rng: random.Random) -> list[Case]:
    dtypes = rng.sample(inputs.DTYPES, 4)
    cases = []
    for world_size, dtype in zip((4, 2, 3, 5), dtypes, strict=True):
        shape = (rng.randint(2**20, 2**21), 3) if world_size == 2 else inputs.shape(rng)
        cases.append(Case(tuple(inputs.tensor(rng, shape, dtype) for _ in range(world_size))))
    return [*cases, Case((inputs.tensor(rng, inputs.shape(rng), "float32"),))]


def call(fn: Callable, tensor: Any) -> Any:
    """Runs in a rank: what came back, and what the tensor that was handed in holds afterwards."""
    out = attempts.called(fn, "tensor", tensor)
    return out if attempts.no_result(out) else (out, tensor)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    if case.world_size == 1:
        cause, sentence = "world_of_one", "one rank is its own neighbour on both sides: nothing can be sent."
    elif case.world_size % 2 and case.world_size > 1:
        cause, sentence = (
            "odd_world",
            "it works on even rings: on an odd one, two neighbours are of the same kind.",
        )
    elif attempts.all_wait_in(observed, "send"):
        cause, sentence = "send_first", ""
    elif attempts.all_wait_in(observed, "recv"):
        cause, sentence = "recv_first", ""
    else:
        return failed
    return wrong(
        "attempted", cause, f"{sentence} {failed.sentence}".strip(), case.tried, failed.got, failed.expected
    )


def _returned(case: Case, observed: Observed) -> Verdict | None:
    for rank, (out, _) in enumerate(observed.results):
        if out is None or kind(out) != kind(case.tensors[0]):
            cause, what = ("returns_nothing", "nothing") if out is None else inputs.other_kind(out, case.tensors[0])
            sentence = f"rank {rank} returned {what}; return the tensor that came from its left neighbour."
            if case.world_size == 1:
                cause, sentence = "world_of_one", f"a lone rank returned {what}; {_ALONE}."
            return wrong("shape", cause, sentence, case.tried, kind(out), kind(case.tensors[0]))
    return None


def _values(case: Case, observed: Observed) -> Verdict | None:
    outs = [out for out, _ in observed.results]
    for rank, out in enumerate(outs):
        if not inputs.same(out, case.left_of(rank)):
            cause, sentence = _wrong_value(case, observed, rank, outs)
            got, expected = inputs.apart(out, case.left_of(rank))
            left = (rank - 1) % case.world_size
            return wrong("values", cause, sentence, case.tried, f"rank {rank}: {got}", f"{expected} from rank {left}")
    for rank, (_, held) in enumerate(observed.results):
        if not inputs.same(held, case.tensors[rank]):
            sentence = f"rank {rank}'s own tensor was received over; receive into a tensor of its own."
            got, expected = inputs.apart(held, case.tensors[rank])
            return wrong("values", "overwrites_input", sentence, case.tried, got, expected)
    return evidence.own_storage(observed, case.tried)


def _wrong_value(case: Case, observed: Observed, rank: int, outs: list) -> tuple[str, str]:
    size, everyone = case.world_size, range(case.world_size)
    if size == 1:
        return "world_of_one", f"a lone rank returned other values than its own; {_ALONE}."
    if attempts.left_open(observed) is not None:
        return "not_waited", "the result was returned while its recv was still under way: wait for it first."
    if size % 2 and size > 1:
        return "odd_world", "it works on even rings: on an odd one, two neighbours are of the same kind."
    if all(inputs.same(outs[r], case.tensors[r]) for r in everyone):
        return "returns_own", "every rank returns what it sent, not what it received."
    if size > 2 and all(inputs.same(outs[r], case.tensors[(r + 1) % size]) for r in everyone):
        return (
            "wrong_direction",
            "the tensors go round the other way: send to rank + 1, receive from rank - 1.",
        )
    if size > 2 and all(inputs.same(outs[r], case.tensors[r ^ 1]) for r in everyone if r ^ 1 < size):
        return "pairs", "ranks swap in pairs; in a ring the one you send to is not the one you receive from."
    if all(inputs.same(outs[r], case.left_of(r)) for r in range(1, size)):
        return "no_wraparound", "only rank 0 is wrong: the last rank's right neighbour is rank 0."
    return "wrong_values", f"rank {rank} does not return what its left neighbour sent."


def _how(case: Case, observed: Observed) -> Verdict | None:
    num_bytes = case.tensors[0].nbytes if case.world_size > 1 else 0
    return (
        evidence.only_p2p(observed, case.tried)
        or attempts.all_waited(observed, case.tried)
        or evidence.cannot_hang(observed, case.tried)
        or evidence.received_at_least(observed, [num_bytes] * case.world_size, case.tried)
        or _one_message_each(case, observed)
        or honest(observed, case.tried)
    )


def _one_message_each(case: Case, observed: Observed) -> Verdict | None:
    if case.world_size == 1:
        return None
    for rank in range(case.world_size):
        sent = [message for message in evidence.messages(observed) if message.source == rank]
        if len(sent) != 1 or sent[0].num_bytes != case.tensors[rank].nbytes:
            told = (
                f"rank {rank} sent {len(sent)} messages, {sum(message.num_bytes for message in sent)} bytes"
            )
            sentence = "each rank sends its tensor once, to its right neighbour, and nothing else."
            expected = f"1 message of {case.tensors[rank].nbytes} bytes"
            return wrong("evidence", "too_many_messages", sentence, case.tried, told, expected)
    return None
