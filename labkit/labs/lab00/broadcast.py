"""Judge of exercise 0.2, `broadcast`: from send and recv, any world size, any root, in ceil(log2 n) rounds.

A round is one message in and one out per rank at a time; rounds are counted in virtual time from what the
ranks recorded (`labkit.check.rounds`), so the count does not depend on the machine. Left out:
broadcasts in pieces, better for long messages and a subject of lab 01; here the tensor travels whole.
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

NAME = "broadcast"


@dataclass(frozen=True)
class Case:
    """One call: the tensors that went in, by rank, and the root."""

    tensors: tuple[Any, ...]
    root: int

    @property
    def world_size(self) -> int:
        return len(self.tensors)

    @property
    def tried(self) -> str:
        return f"world_size={self.world_size}, root={self.root}, {inputs.describe(self.tensors[0])}"

    @property
    def rounds(self) -> int:
        return (self.world_size - 1).bit_length()

    @property
    def power_of_two(self) -> bool:
        return self.world_size & (self.world_size - 1) == 0


def judge(fn: Callable, seed: int) -> Verdict:
    """World sizes 1 to 8, powers of two first and root 0 first, so that what fails tells what is missing."""
    seen = []
    for case in _cases(random.Random(seed)):
        observed = evidence.observe(
            call, case.world_size, rank_args=[(t, case.root) for t in case.tensors], args=(fn,)
        )
        found = _ran(case, observed) or _returned(case, observed) or _values(case, observed)
        if found is not None:
            return found
        seen.append((case, observed))
    for case, observed in seen:
        found = _how(case, observed)
        if found is not None:
            return found
    most = max(case.rounds for case, _ in seen)
    return right(
        f"world sizes 1 to 8, roots other than 0 too; {most} rounds on 8 ranks, where a star takes 7"
    )


def _cases(rng: random.Random) -> list[Case]:
    plan = [(2, 0), (4, 0), (4, rng.randint(1, 3)), (8, rng.randint(1, 7))]
    plan += [(size, rng.randint(1, size - 1)) for size in (3, 5, 7, 6)] + [(1, 0)]
    cases = []
    for number, (world_size, root) in enumerate(plan):
        shape, dtype = inputs.shape(rng), inputs.DTYPES[number % len(inputs.DTYPES)]
        cases.append(Case(tuple(inputs.tensor(rng, shape, dtype) for _ in range(world_size)), root))
    return cases


def call(fn: Callable, tensor: Any, root: int) -> Any:
    """Runs in a rank: what came back, and what the tensor that was handed in holds afterwards."""
    out = attempts.called(fn, "tensor, root", tensor, root)
    return out if attempts.no_result(out) else (out, tensor)


def _ran(case: Case, observed: Observed) -> Verdict | None:
    failed = attempts.ran(observed, NAME, case.tried)
    if failed is None or failed.cause in attempts.CAUSES:
        return failed
    if case.world_size == 1:
        cause, sentence = "world_of_one", "one rank has nobody to talk to: there is nothing to send."
    elif not case.power_of_two:
        cause, sentence = (
            "powers_of_two",
            "it works on 2, 4 and 8 ranks and not between: some partner does not exist.",
        )
    elif case.root != 0:
        cause, sentence = (
            "tree_not_shifted",
            "it works from rank 0 alone: turn places after the root into ranks.",
        )
    else:
        return failed
    return wrong("attempted", cause, f"{sentence} {failed.sentence}", case.tried, failed.got, failed.expected)


def _returned(case: Case, observed: Observed) -> Verdict | None:
    for rank, (out, _) in enumerate(observed.results):
        if out is None:
            sentence = f"rank {rank} returned nothing; return the tensor on every rank."
            return wrong("shape", "returns_nothing", sentence, case.tried, "None", kind(case.tensors[0]))
        if kind(out) != kind(case.tensors[0]):
            cause, what = inputs.other_kind(out, case.tensors[0])
            sentence = f"rank {rank} returned {what}; return the tensor that was handed in."
            return wrong("shape", cause, sentence, case.tried, kind(out), kind(case.tensors[0]))
    return None


def _values(case: Case, observed: Observed) -> Verdict | None:
    truth = case.tensors[case.root]
    for rank, (out, held) in enumerate(observed.results):
        if not inputs.same(out, truth):
            cause, sentence = _wrong_value(case, observed, rank)
            got, expected = inputs.apart(out, truth)
            return wrong("values", cause, sentence, case.tried, f"rank {rank}: {got}", expected)
        if not inputs.same(held, truth):
            sentence = f"rank {rank} returned the right values, but `tensor` still holds others: fill it in place."
            got, expected = inputs.apart(held, truth)
            return wrong("values", "not_in_place", sentence, case.tried, f"rank {rank}: {got}", expected)
    return None


def _wrong_value(case: Case, observed: Observed, rank: int) -> tuple[str, str]:
    outs = [out for out, _ in observed.results]
    out, truth = outs[rank], case.tensors[case.root]
    if attempts.left_open(observed) is not None:
        return "not_waited", "a recv was still under way when its tensor was used: call `wait()` on it first."
    if inputs.same(out, inputs.through_float32(truth)):
        return (
            "dtype_lost",
            "the values lost precision on the way: they were sent as another dtype than they have.",
        )
    if case.root != 0 and all(inputs.same(each, case.tensors[0]) for each in outs):
        return "root_ignored", f"every rank holds rank 0's values; the root is rank {case.root}."
    if inputs.same(out, case.tensors[rank]):
        return "unreached", f"rank {rank} still holds its own values: no message reached it."
    senders = [other for other, tensor in enumerate(case.tensors) if inputs.same(out, tensor)]
    if senders:
        return (
            "wrong_sender",
            f"rank {rank} holds the values of rank {senders[0]}; the root is rank {case.root}.",
        )
    if inputs.partly(out, truth, case.tensors[rank]):
        return "part_only", f"only part of the tensor reached rank {rank}: the rest is still its own. Send it whole."
    return "wrong_values", f"rank {rank} holds values that no rank started with."


def _how(case: Case, observed: Observed) -> Verdict | None:
    num_bytes = case.tensors[0].nbytes
    needed = [0 if rank == case.root else num_bytes for rank in range(case.world_size)]
    return (
        evidence.only_p2p(observed, case.tried)
        or attempts.all_waited(observed, case.tried)
        or evidence.cannot_hang(observed, case.tried)
        or evidence.received_at_least(observed, needed, case.tried)
        or _one_message(case, observed)
        or _rounds(case, observed)
        or _once(case, observed, needed)
        or honest(observed, case.tried)
    )


def _one_message(case: Case, observed: Observed) -> Verdict | None:
    """No rank sends another more than one message: pieces and counts take rounds that a tree does not need."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for message in evidence.messages(observed):
        sizes.setdefault((message.source, message.destination), []).append(message.num_bytes)
    for (source, destination), sent in sizes.items():
        if len(sent) == 1:
            continue
        again = all(num_bytes == case.tensors[0].nbytes for num_bytes in sent)
        cause, rule = (
            ("sent_twice", "once is enough")
            if again
            else ("many_messages", "send the whole tensor once, and nothing else: its shape and dtype are known")
        )
        sentence = f"rank {source} sends {len(sent)} messages to rank {destination}; {rule}."
        got = f"messages of {', '.join(map(str, sent[:6]))}{', ...' if len(sent) > 6 else ''} bytes"
        return wrong("evidence", cause, sentence, case.tried, got, f"one of {case.tensors[0].nbytes} bytes")
    return None


def _rounds(case: Case, observed: Observed) -> Verdict | None:
    taken = evidence.timeline(observed).rounds
    if taken <= case.rounds:
        return None
    sent = [0] * case.world_size
    for message in evidence.messages(observed):
        sent[message.source] += 1
    others = case.world_size - 1
    if evidence.received_bytes(observed)[case.root]:
        cause, sentence = (
            "detour",
            "the root is sent its own values: the way through another rank costs a round.",
        )
    elif max(sent) == others:
        hub = sent.index(others)
        cause, sentence = (
            "star",
            (
                f"rank {hub} sends all {others} messages itself, one after the other; "
                "a rank that has the values can pass them on."
            ),
        )
    elif max(sent) <= 1:
        cause, sentence = "chain", "each rank tells one other and stops; all the others wait their turn."
    else:
        cause, sentence = "slow_tree", "a tree, but some ranks that already know stay idle while others wait."
    return wrong("evidence", cause, sentence, case.tried, f"{taken:g} rounds", f"at most {case.rounds}")


def _once(case: Case, observed: Observed, needed: list[int]) -> Verdict | None:
    for rank, (got, least) in enumerate(zip(evidence.received_bytes(observed), needed, strict=True)):
        if got > least:
            sentence = (
                f"rank {rank} is sent more than the tensor once: every message after the first is wasted."
            )
            return wrong("evidence", "sent_twice", sentence, case.tried, f"{got} bytes", f"{least} bytes")
    return None
