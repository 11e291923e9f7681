"""Who waits for whom, read from ledgers: pure functions. Left out: what to say about it (`verdict`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.ranks.layout import P2P
from labkit.ranks.ledger import Entry, Ledger


@dataclass(frozen=True)
class Need:
    """The call a rank is in, and the ranks that have not done their part; with `any_of_them` one of them is enough
    (a recv from any source)."""

    entry: Entry
    ranks: tuple[int, ...]
    any_of_them: bool = False


def current(ledger: Ledger, state: str) -> Entry | None:
    """The call in which a rank waits, or (raised, died) in which it was when it ended; None when it computes."""
    if state == "returned":
        return None
    waiting = [entry for entry in ledger.entries if entry.state == "waiting"]
    if waiting:
        return waiting[-1]
    last = ledger.entries[-1] if ledger.entries else None
    if last is None or state == "running":
        return None
    ended_there = ("failed", "refused") if state == "raised" else ("issued",)
    return last if last.state in ended_there else None


def needs(ledgers: Sequence[Ledger], states: Sequence[str]) -> dict[int, Need]:
    """For each rank that waits for others to act: its Need. A call in which every part is done needs nobody."""
    result = {}
    for rank, (ledger, state) in enumerate(zip(ledgers, states, strict=True)):
        entry = current(ledger, state) if state in ("running", "raised") else None
        if entry is not None:
            need = _need(ledgers, rank, entry)
            if need.ranks:
                result[rank] = need
    return result


def cycle(needed: Mapping[int, Need]) -> tuple[int, ...]:
    """Ranks that wait for one another in a circle and will for ever, each for the next; () when there is none.

    The largest set in which every rank needs a member of the set (from any source: only members); then a walk in it.
    """
    stuck = set(needed)
    while True:
        free = {rank for rank in stuck if not _holds(needed[rank], stuck)}
        if not free:
            break
        stuck -= free
    if not stuck:
        return ()
    walk = [min(stuck)]
    while True:
        following = min(rank for rank in needed[walk[-1]].ranks if rank in stuck)
        if following in walk:
            return tuple(walk[walk.index(following) :])
        walk.append(following)


def _holds(need: Need, stuck: set[int]) -> bool:
    inside = [rank in stuck for rank in need.ranks]
    return all(inside) if need.any_of_them else any(inside)


def _need(ledgers: Sequence[Ledger], rank: int, entry: Entry) -> Need:
    if entry.op not in P2P:
        behind = (r for r in entry.ranks if r != rank and _issued(ledgers[r], entry) <= entry.sequence)
        return Need(entry, tuple(behind))
    if entry.root is None:
        others = tuple(r for r in entry.ranks if r != rank)
        return Need(entry, () if _may_have_a_message(ledgers, rank, entry) else others, any_of_them=True)
    op = "recv" if entry.op == "send" else "send"
    done = _messages(ledgers[entry.root], entry, op, rank)
    if op == "recv":
        done += _messages(ledgers[entry.root], entry, op, None)
    return Need(entry, (entry.root,) if done <= entry.sequence else ())


def _issued(ledger: Ledger, entry: Entry) -> int:
    return sum(t.count for t in ledger.groups if (t.group, t.ranks) == (entry.group, entry.ranks))


def _messages(ledger: Ledger, entry: Entry, op: str, peer: int | None) -> int:
    return sum(
        c.count
        for c in ledger.channels
        if (c.op, c.peer, c.tag, c.group, c.ranks) == (op, peer, entry.tag, entry.group, entry.ranks)
    )


def _may_have_a_message(ledgers: Sequence[Ledger], rank: int, entry: Entry) -> bool:
    """Whether somebody has sent more under this tag than this rank has taken from it by name or by chance."""
    return any(
        _messages(ledgers[other], entry, "send", rank) > _messages(ledgers[rank], entry, "recv", other)
        for other in entry.ranks
        if other != rank
    )
