"""Judge of exercise 6.6, `ring_attention`: keys and values go round, softmax is put together as they come.

The sequence is 2n chunks and rank i of n has the i-th and the (2n-1-i)-th, so that under the causal mask all have the
same work (Liu et al., arXiv:2310.01889; the order: Llama 3, arXiv:2407.21783, section 3.3.2). k and v take n-1 hops
forward and again in backward, where their gradients travel with them and come home. What is multiplied, forward and
backward, tells whether masked blocks are worked on (`ring_work`, which says what escapes it). Left out: grouped KV
heads, and overlap of hops with products.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab06.functions as functions
import labkit.labs.lab06.ring_told as ring_told
import labkit.labs.lab06.ring_work as ring_work
import labkit.labs.lab06.seen as seen
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, right, wrong
from labkit.labs.lab00 import attempts
from labkit.labs.lab06.functions import Case, Task

NAME = "ring_attention"
HEADS, HEAD_DIM = 2, 32


def judge(fn: Callable, seed: int) -> Verdict:
    """Four ranks, then two groups of two, chunks being as long; values and gradients, then messages, then work."""
    rng = random.Random(seed)
    chunk = rng.randint(14, 17)
    cases = [_case(rng, 4, 4, chunk), _case(rng, 4, 2, chunk)]
    found, observed = functions.judged(fn, task(), cases)
    found = found or _work(cases, observed)
    if found is not None:
        return found
    sent = observed[0].records[0].sent_bytes
    return right(f"equal to serial attention; a rank of 4 sends {sent:,} bytes in all, and all do the same work")


def _case(rng: random.Random, world: int, t: int, chunk: int) -> Case:
    import torch

    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    batch, groups = 2, []
    for _ in range(world // t):
        q, k, v, gradient = torch.randn(4, batch, HEADS, 2 * t * chunk, HEAD_DIM, generator=generator)
        groups.append((2 * q, 2 * k, v, gradient))  # scores far enough apart that a forgotten rescaling shows
    ask = []
    for rank in range(world):
        q, k, v, gradient = (ring_told.own(each, rank % t, t) for each in groups[rank // t])
        ask.append(((q, k, v), gradient))
    return Case(f"{HEADS} heads of {HEAD_DIM}, {2 * t} chunks of {chunk}", world, t, (tuple(ask),))


def _record(case: Case, number: int, rank: int, record: Any, part: seen.Part) -> Verdict | None:
    n, (_, k, v) = case.t, case.asks[number][rank][0]
    pair = k.nbytes + v.nbytes
    forward, backward = (seen.between(record, *ends) for ends in ((part.begin, part.middle), (part.middle, part.end)))
    wanted = f"forward {n - 1} hops of k and v ({(n - 1) * pair} bytes), backward the same and their gradients home"

    def failing(cause: str, sentence: str) -> Verdict:
        ways = (f"{sum(e.sent_bytes for e in events)} bytes sent" for events in (forward, backward))
        got = f"rank {rank}: forward {next(ways)}; backward {next(ways)}"
        return wrong("evidence", cause, sentence, case.tried, got, wanted)

    if any(event.op not in ("send", "recv") for event in (*forward, *backward)):
        return failing("collective", "a collective brings all keys and values at once: send and recv, hop by hop.")
    for events in (forward, backward):
        if len({event.peer for event in events if event.op == "send"}) > 1:
            return failing("not_a_ring", "messages go to several ranks: in a ring each sends to its neighbour alone.")
    sent, back = (sum(e.sent_bytes for e in events) for events in (forward, backward))
    if sent != (n - 1) * pair:
        if sent == n * pair:
            return failing("last_hop", f"{n} hops forward: after {n - 1} every rank has seen all.")
        return failing("other_traffic", f"k and v take {n - 1} hops forward: each rank passes on what it holds.")
    if back < 2 * (n - 1) * pair:
        sentence = "all ranks' keys and values are kept from forward to backward, n times the memory: send them again."
        return failing("all_kept", sentence)
    if back > (2 * n - 1) * pair:
        return failing("last_hop", f"in backward k and v need {n - 1} hops and their gradients at most {n}.")
    return None


def _work(cases: list[Case], observed: list[Observed]) -> Verdict | None:
    """Cause "masked_work": more blocks than are due, and a hop of others' keys costs too much beside that of the own.

    The second alone would not do where work is spread in another way, nor the first, for a block may be made of more
    products than the two that are needed: scores for their maximum and once more, a log-sum-exp beside a kernel.
    """
    four, two = (ring_work.of_ranks(*each) for each in zip(cases, observed, strict=True))
    most, due = ring_work.most(cases[0].t), (2 * cases[0].t + 1, 2.5 * (2 * cases[0].t + 1))
    for number, way in enumerate(("forward", "backward")):
        ours, hop = ring_work.hops(four[number], two[number], cases[0].t, cases[1].t)
        if four[number] > most[number] and ours < ring_work.OWN_TO_OTHER * hop:
            sentence = f"blocks that the mask empties are computed in {way}: a chunk of queries needs no later keys."
            got = f"{four[number]:.1f} blocks a rank: {ours:.1f} for its own keys, {hop:.1f} for those of each hop"
            expected = f"{due[number]:g} blocks: of its own keys 3 of 4, of others' 2 of 4"
            return wrong("evidence", "masked_work", sentence, cases[0].tried, got, expected)
    return None


def _failed(case: Case, observed: Observed, failed: Verdict) -> tuple[str, str] | None:
    if failed.cause not in ("deadlock", "stalled"):
        return None
    if attempts.all_wait_in(observed, "send"):
        return "deadlock", "every rank sends first and waits for one that sends too: isend and irecv, then wait."
    if attempts.all_wait_in(observed, "recv"):
        return "recv_first", "every rank receives first, and none has sent: isend and irecv, then wait."
    return "uneven_hops", "ranks wait for each other: in a hop each sends once and receives once, all as many hops."


def task() -> Task:
    """What the exercise demands."""
    return Task(NAME, "q, k, v, group", ring_told.calls, _record, failed=_failed, trained=3)
