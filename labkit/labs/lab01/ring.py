"""Judge of exercise 1.1, `ring_all_reduce`: a sum over ranks from send and recv, in place, round a ring.

A tensor of N elements is cut into n chunks of at most ceil(N / n) elements; every chunk goes round the ring almost
twice, so every rank sends 2(n-1) messages and all ranks together 2(n-1) times the tensor, to the byte and whatever
the cut. Rounds are counted in virtual time (`labkit.check.rounds`). Left out: pieces smaller than a chunk, which
hide the time of the additions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import labkit.labs.lab01.inputs as inputs
import labkit.labs.lab01.told as told
from labkit.check import evidence
from labkit.check.compare import kind
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts
from labkit.labs.lab00.inputs import describe, head, same

NAME = "ring_all_reduce"


@dataclass(frozen=True)
class Case:
    """One call: the tensors that went in, by rank."""

    tensors: tuple[Any, ...]

    @property
    def world_size(self) -> int:
        return len(self.tensors)

    @property
    def num_elements(self) -> int:
        return self.tensors[0].numel()

    @property
    def uneven(self) -> bool:
        return bool(self.num_elements % self.world_size)

    @property
    def tried(self) -> str:
        return f"world_size={self.world_size}, {describe(self.tensors[0])}"

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk that the task allows."""
        return -(-self.num_elements // self.world_size) * self.tensors[0].element_size()

    @property
    def messages(self) -> int:
        """Messages that each rank sends, and rounds that they take."""
        return 2 * (self.world_size - 1)


def judge(fn: Callable, seed: int) -> Verdict:
    """Four ranks and equal chunks first, then chunks that differ, other world sizes, a single rank."""
    seen = []
    for case in _cases(random.Random(seed)):
        observed = evidence.observe(call, case.world_size, args=(fn,), rank_args=[(t,) for t in case.tensors])
        found = _ran(case, observed) or _returned(case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for question in (_arrived, _shared, _amount, _neighbours, _rounds):
        for case, observed in seen:
            found = question(case, observed)
            if found is not None:
                return found
    for case, observed in seen:
        found = honest(observed, case.tried)
        if found is not None:
            return found
    case, observed = seen[0]
    sent, num_bytes = evidence.sent_bytes(observed)[0], case.tensors[0].nbytes
    return right(
        f"on {case.world_size} ranks each sent {case.messages} messages and {sent / num_bytes:g} times the tensor, "
        f"in {case.messages} rounds; uneven chunks and other world sizes too"
    )


def _cases(rng: random.Random) -> list[Case]:
    def case(world_size: int, shape: tuple[int, ...], dtype: str) -> Case:
        return Case(tuple(inputs.tensor(rng, shape, dtype) for _ in range(world_size)))

    return [
        case(4, (rng.randint(2, 5), 4 * rng.randint(3, 9)), "float32"),
        case(2, inputs.split(rng, 2, 1), "int64"),
        case(4, (5,), "float64"),
        case(3, inputs.split(rng, 3, rng.randint(1, 2)), "float64"),
        case(5, inputs.split(rng, 5, rng.randint(1, 4)), rng.choice(("int64", "bfloat16", "int32"))),
        case(1, inputs.split(rng, 2, 1), "float32"),
    ]


def call(fn: Callable, tensor: Any) -> Any:
    """Runs in a rank: what came back, and what the tensor that was handed in holds afterwards."""
    out = fn(tensor)
    return out if out is NotImplemented else (out, tensor)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = evidence.ran(observed, NAME, case.tried)
    if failed is None or failed.cause == "not_attempted":
        return failed
    if case.world_size == 1:
        cause, sentence = "world_of_one", "one rank already holds the sum: there is nobody to send to."
    elif any(sum(_under_way(entry) for entry in ledger) > 1 for ledger in observed.outcome.ledgers):
        cause, sentence = "not_waited", "an isend that nobody waits for may never be sent: keep it, and wait()."
    elif attempts.all_wait_in(observed, "send"):
        cause, sentence = "send_first", "every rank waits in send, and nobody receives: use isend."
    elif attempts.all_wait_in(observed, "recv"):
        cause, sentence = "recv_first", "every rank waits in recv, and nobody has sent."
    elif case.uneven:
        cause, sentence = (
            "uneven_chunks",
            f"{case.num_elements} elements do not divide by {case.world_size}; there must be {case.world_size} "
            "chunks all the same, and sender and receiver must agree on the size of each.",
        )
    else:
        return failed
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _under_way(entry: Any) -> bool:
    return entry.op == "send" and entry.state == "issued"


def _returned(case: Case, observed: Observed) -> Verdict | None:
    for rank, (out, _) in enumerate(observed.results):
        if out is None:
            sentence = f"rank {rank} returned nothing; return the tensor on every rank."
            return wrong("shape", "returns_nothing", sentence, case.tried, "None", kind(case.tensors[0]))
        if kind(out) != kind(case.tensors[0]):
            sentence = f"rank {rank} returned another type or shape than it was given."
            return wrong("shape", "wrong_shape", sentence, case.tried, kind(out), kind(case.tensors[0]))
    return None


def _values(case: Case, observed: Observed) -> Verdict | None:
    total = inputs.total(case.tensors)
    for rank, (out, _) in enumerate(observed.results):
        if not same(out, total):
            outs = [out for out, _ in observed.results]
            cause, sentence = _left_open(observed) or told.wrong_sum(case.tensors, outs, rank)
            return wrong("values", cause, sentence, case.tried, f"rank {rank}: {head(out)}", head(total))
    for rank, (_, held) in enumerate(observed.results):
        if not same(held, total):
            sentence = f"rank {rank} returned the sum, but `tensor` still holds something else: reduce it in place."
            return wrong("values", "not_in_place", sentence, case.tried, head(held), head(total))
    return None


def _left_open(observed: Observed) -> tuple[str, str] | None:
    """Whether a rank never waited for a message, which then may not have come or gone."""
    found = attempts.never_waited(observed)
    if found is None:
        return None
    return "not_waited", f"rank {found[0]} never waited for its {found[1]}: its chunk was used while under way."


def _arrived(case: Case, observed: Observed) -> Verdict | None:
    """By send and recv, with every message received and waited for, and enough of them."""
    found = evidence.only_p2p(observed, case.tried)
    open_ = _left_open(observed)
    if found is None and open_ is not None:
        found = wrong("evidence", *open_, case.tried, "a message without wait()", "every message waited for")
    least = [case.num_elements // case.world_size * case.tensors[0].element_size() if case.messages else 0]
    return (
        found
        or evidence.cannot_hang(observed, case.tried)
        or evidence.received_at_least(observed, least * case.world_size, case.tried)
    )


def _shared(case: Case, observed: Observed) -> Verdict | None:
    """No message larger than a chunk, no rank with more than its share of them."""
    sent, messages = evidence.sent_bytes(observed), evidence.messages(observed)
    fair = case.messages * case.chunk_bytes
    hot = max(range(case.world_size), key=sent.__getitem__)
    if sent[hot] > fair and sent[hot] > 1.5 * min(sent):
        sentence = f"rank {hot} sends {sent[hot] / max(1, min(sent)):.2g} times what another does: all wait for it."
        if not min(sent):
            sentence = f"rank {hot} sends {sent[hot]} bytes and another rank none: all wait for one."
        return wrong("evidence", "hot_rank", sentence, case.tried, f"{sent[hot]} bytes", f"at most {fair} a rank")
    for message in messages:
        if message.num_bytes > case.chunk_bytes:
            sentence = f"rank {message.source} sends more than one chunk at a time: cut the tensor into n chunks."
            got = f"a message of {message.num_bytes} bytes"
            return wrong("evidence", "whole_tensor", sentence, case.tried, got, f"at most {case.chunk_bytes} bytes")
    return None


def _amount(case: Case, observed: Observed) -> Verdict | None:
    messages = evidence.messages(observed)
    total, due = sum(m.num_bytes for m in messages), case.messages * case.tensors[0].nbytes
    if total > due:
        padded = {m.num_bytes for m in messages} == {case.chunk_bytes} and len(messages) == case.messages * len(
            case.tensors
        )
        cause = "padding" if padded else "bytes_extra"
        why = "chunks are padded to equal length" if padded else "some chunk travels further than it must"
        sentence = f"{why}: all ranks together send more than 2(n-1) times the tensor."
        return wrong("evidence", cause, sentence, case.tried, f"{total} bytes", f"{due} bytes")
    if total < due:
        sentence = "all ranks together send less than a sum needs: something went another way."
        return wrong("evidence", "no_traffic", sentence, case.tried, f"{total} bytes", f"{due} bytes")
    for rank in range(case.world_size):
        count = sum(m.source == rank for m in messages)
        if count != case.messages:
            sentence = f"rank {rank} does not send 2(n-1) messages, one chunk each."
            return wrong("evidence", "message_count", sentence, case.tried, f"{count}", f"{case.messages}")
    return None


def _neighbours(case: Case, observed: Observed) -> Verdict | None:
    for rank in range(case.world_size):
        to = sorted({m.destination for m in evidence.messages(observed) if m.source == rank})
        if len(to) > 1:
            sentence = "the bytes are right, but this is no ring: on a ring a rank sends to one neighbour only."
            got = f"rank {rank} sends to ranks {', '.join(map(str, to))}"
            return wrong("evidence", "not_a_ring", sentence, case.tried, got, "one neighbour")
    return None


def _rounds(case: Case, observed: Observed) -> Verdict | None:
    taken = evidence.timeline(observed).rounds
    if taken <= case.messages:
        return None
    if taken <= 2 * case.messages + 1:
        cause, sentence = "turns", "ranks send and receive in turn, so half of the links idle: use isend."
    else:
        cause, sentence = "one_at_a_time", "ranks wait for one another: all can send at the same time."
    return wrong("evidence", cause, sentence, case.tried, f"{taken:g} rounds", f"{case.messages} rounds")
