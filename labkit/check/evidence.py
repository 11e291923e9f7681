"""Evidence: predicates on what was seen of a function that ran on ranks under watch (`observe`).

A predicate gives a failing Verdict, or None when it holds, so a judge is a chain: `ran(o, ...) or
values_equal(o, ...) or only_p2p(o, ...) or honest(o, ...) or right(...)`. What the parent saw from outside
(ledger, socket bytes, the group's own counter) is asked before what a rank said of itself (its record).
Results are opened with care (`labkit.ranks.receiving`), so a hostile pickle does not run in the judging process. What
stays out of reach: a rank is the learner's own process, so native code in it can change memory, its record and the
ledger alike, and a process of the same user can read and write the judge's memory where the system lets it; that is
why grades rest on a rerun of the same judge in a clean, sandboxed process. Left out: predicates on memory and FLOPs,
which come with their labs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.check import compare, programs, rounds
from labkit.check.exercise import Verdict, not_attempted, wrong
from labkit.check.honesty import hidden_operations, honest, records_agree
from labkit.check.observed import Observed, observe

P2P = ("send", "recv")
__all__ = [
    "Message",
    "Observed",
    "bytes_sent_equal",
    "cannot_hang",
    "collectives",
    "honest",
    "messages",
    "no_communication",
    "observe",
    "only_p2p",
    "own_storage",
    "ran",
    "ranks_agree",
    "received_at_least",
    "received_bytes",
    "rounds_at_most",
    "sent_bytes",
    "timeline",
    "values_equal",
    "work_is_shared",
]


@dataclass(frozen=True)
class Message:
    """One message as its sender called it: global ranks, bytes, and the raw "filename:line" of the call."""

    source: int
    destination: int
    num_bytes: int
    place: str


# What came back


def ran(observed: Observed, name: str, tried: str = "") -> Verdict | None:
    """Stage "attempted": a stub, or what made the ranks fail, with the launch's own cause and sentence."""
    if any(result is NotImplemented for result in observed.results):
        return not_attempted(name)
    cause = observed.outcome.cause
    if cause is None:
        return None
    where = [w for w in cause.whereabouts if w.place and w.rank == cause.rank]
    place = f" ({where[0].place})" if where and where[0].place not in cause.sentence else ""
    got = "; ".join(str(w) for w in cause.whereabouts)
    return wrong("attempted", cause.code, f"{cause.sentence}{place}", tried, got, "every rank returns")


def values_equal(
    observed: Observed, expected: Sequence[Any], tried: str = "", rtol: float = 0.0, atol: float = 0.0
) -> Verdict | None:
    """Stages "shape" and "values": each rank's result against `expected[rank]`, shapes of all ranks first.

    Causes "wrong_shape" and "wrong_values".
    """
    found = [
        (rank, compare.difference(result, expected[rank], rtol, atol)) for rank, result in enumerate(observed.results)
    ]
    found = [(rank, d) for rank, d in found if d is not None]
    for stage in ("shape", "values"):
        for rank, d in found:
            if d.stage == stage:
                what = "another type or shape" if stage == "shape" else "other values"
                sentence = f"rank {rank} returned {what} than expected{' at ' + d.where if d.where else ''}."
                return wrong(stage, f"wrong_{stage}", sentence, tried, f"rank {rank}: {d.got}", d.expected)
    return None


def ranks_agree(observed: Observed, tried: str = "", rtol: float = 0.0, atol: float = 0.0) -> Verdict | None:
    """Stage "agree": every rank returned what rank 0 did. Cause "ranks_differ"."""
    found = compare.same_on_all(observed.results, rtol, atol)
    if found is None:
        return None
    rank, d = found
    sentence = f"ranks 0 and {rank} returned different results{' at ' + d.where if d.where else ''}; all must agree."
    return wrong("agree", "ranks_differ", sentence, tried, f"rank {rank}: {d.got}", f"as rank 0: {d.expected}")


def own_storage(observed: Observed, tried: str = "", item: int = 0) -> Verdict | None:
    """Stage "values": no rank returned a tensor in the storage of one of its arguments. Cause "aliased".

    item: which tensor, where the call returns a tuple. Asked in the rank, for a pickle cannot tell.
    """
    for rank, integrity in enumerate(observed.integrity):
        if integrity is not None and item in integrity.shared:
            sentence = f"rank {rank} returned a tensor in the storage it was given: writing into one changes the other."
            got = "the storage of an argument"
            return wrong("values", "aliased", sentence, tried, f"rank {rank}: {got}", "a storage of its own")
    return None


# How it came about


def messages(observed: Observed) -> tuple[Message, ...]:
    """Every message that was sent, from the ledgers: by source, then in the order of the calls."""
    return tuple(
        Message(rank, entry.root, entry.num_bytes, entry.place)
        for rank, ledger in enumerate(observed.outcome.ledgers)
        for entry in ledger
        if entry.op == "send" and entry.state != "refused"
    )


def sent_bytes(observed: Observed) -> list[int]:
    """Bytes of the messages each rank sent, from the ledgers."""
    return [sum(m.num_bytes for m in messages(observed) if m.source == r) for r in range(observed.world_size)]


def received_bytes(observed: Observed) -> list[int]:
    """Bytes of the messages that were sent to each rank, from the ledgers."""
    return [sum(m.num_bytes for m in messages(observed) if m.destination == r) for r in range(observed.world_size)]


def collectives(observed: Observed) -> list[str]:
    """Names of the collectives used, in order of first use: from the ledgers, the records and the groups'
    counters.

    A collective that only a group's own counter knows of is called "a hidden collective".
    """
    seen = [e.op for ledger in observed.outcome.ledgers for e in ledger if e.op not in P2P and e.state != "refused"]
    counted = len(seen)
    seen += [c.op for record in observed.records if record is not None for c in record.collectives]
    if not seen and counted == 0 and any(hidden_operations(observed)):
        seen.append("a hidden collective")
    return list(dict.fromkeys(seen))


def only_p2p(observed: Observed, tried: str = "") -> Verdict | None:
    """Stage "evidence": no collective was used, a barrier included. Cause "collective"."""
    used = collectives(observed)
    if not used:
        return None
    sentence = f"this exercise is built from send and recv alone, without {', '.join(used)}."
    return wrong("evidence", "collective", sentence, tried, ", ".join(used), "send and recv only")


def no_communication(observed: Observed, tried: str = "") -> Verdict | None:
    """Stage "evidence": no rank sent, received or joined a collective. Cause "communication"."""
    used = collectives(observed) + [f"{len(messages(observed))} messages"] * bool(messages(observed))
    if not used:
        return None
    sentence = "every rank can work this out by itself; no communication is needed."
    return wrong("evidence", "communication", sentence, tried, ", ".join(used), "no communication")


def timeline(observed: Observed) -> rounds.Timeline:
    """The messages in virtual time, under rendezvous sends; see `labkit.check.rounds`.

    From the records, which know where a rank waited; from the ledgers for a run that failed.
    """
    return rounds.simulate(programs.of(observed.records, observed.outcome.ledgers))


def cannot_hang(observed: Observed, tried: str = "") -> Verdict | None:
    """Stage "evidence": under rendezvous sends every rank ends and every message has both ends.

    Causes "deadlock" (ranks wait for one another), "unmatched" (a send without its recv, or the reverse),
    also when this run happened to return.
    """
    partial = _partial_record(observed, tried)
    if partial is not None:
        return partial
    found = timeline(observed)
    if not found.stuck and not found.unmatched:
        return None
    steps = programs.of(observed.records, observed.outcome.ledgers)
    if found.stuck:
        told = "; ".join(f"rank {r} waits in {programs.doing(steps[r][p])}" for r, p in found.stuck[:4])
        sentence = "a send returns only once its recv is posted, and here ranks wait for one another."
        return wrong("evidence", "deadlock", sentence, tried, told, "every rank ends")
    told = "; ".join(f"rank {r}: {programs.doing(steps[r][p])}" for r, p in found.unmatched[:4])
    sentence = "a message has only one end: each send needs its recv, and each recv its send."
    return wrong("evidence", "unmatched", sentence, tried, told, "as many recvs as sends")


def rounds_at_most(observed: Observed, limit: int, tried: str = "") -> Verdict | None:
    """Stage "evidence": the messages take at most `limit` rounds. Cause "too_many_rounds"."""
    partial = _partial_record(observed, tried)
    if partial is not None:
        return partial
    found = timeline(observed)
    if found.rounds <= limit:
        return None
    sentence = "a round is one message in and one out per rank at a time; idle ranks could have helped."
    return wrong("evidence", "too_many_rounds", sentence, tried, f"{found.rounds:g} rounds", f"at most {limit}")


def bytes_sent_equal(observed: Observed, expected: Sequence[int], tried: str = "") -> Verdict | None:
    """Stage "evidence":

    each rank sent exactly `expected[rank]` bytes. Causes "bytes_missing", "bytes_extra".
    """
    got = sent_bytes(observed)
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        if mine != right:
            cause = "bytes_extra" if mine > right else "bytes_missing"
            sentence = f"rank {rank} sent {'more' if mine > right else 'less'} than the task needs."
            return wrong("evidence", cause, sentence, tried, f"{mine} bytes", f"{right} bytes")
    return None


def received_at_least(observed: Observed, needed: Sequence[int], tried: str = "") -> Verdict | None:
    """Stage "evidence": rank r was sent at least `needed[r]` bytes of messages. Cause "no_traffic".

    Whoever has the right values without them got them by another way than the group.
    """
    for rank, (mine, right) in enumerate(zip(received_bytes(observed), needed, strict=True)):
        if mine < right:
            sentence = f"rank {rank} has its result, but too few bytes for it came through send and recv."
            return wrong("evidence", "no_traffic", sentence, tried, f"{mine} bytes received", f"at least {right}")
    return None


def work_is_shared(observed: Observed, most: Sequence[int], tried: str = "") -> Verdict | None:
    """Stage "evidence":

    rank r sent at most `most[r]` bytes. Cause "hot_rank": one rank does the others' work.
    """
    for rank, (mine, limit) in enumerate(zip(sent_bytes(observed), most, strict=True)):
        if mine > limit:
            sentence = f"rank {rank} does the work of others: it sends far more than its share."
            return wrong("evidence", "hot_rank", sentence, tried, f"{mine} bytes", f"at most {limit}")
    return None


def _partial_record(observed: Observed, tried: str) -> Verdict | None:
    """A record that lacks what the ledger has (sent by a thread, say) would tell a wrong story:

    why it does.
    """
    if any(record is None for record in observed.records) or records_agree(observed) is None:
        return None
    return honest(observed, tried)
