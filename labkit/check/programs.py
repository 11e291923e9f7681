"""What each rank did, as the small programs that `labkit.check.rounds` can run again in virtual time.

From records, which know where a rank waited; from ledgers for a run that failed, whose ranks left no record.
Left out: ops and bytes; only who talks to whom, and who waits where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.check.rounds import Post, Wait
from labkit.ranks.places import readable

Program = list[Post | Wait]


def of(records: Sequence[Any], ledgers: Sequence[Any]) -> list[Program]:
    """One program per rank, all from the same source: records if every rank has one, else ledgers."""
    if all(record is not None for record in records):
        return [of_record(record) for record in records]
    return [of_ledger(ledger) for ledger in ledgers]


def of_record(record: Any) -> Program:
    """The program of a RankRecord. Also a wait that was only inferred counts: the data were needed there."""
    from labkit.record import events

    steps: Program = []
    at: dict[int, int] = {}
    for event in record.events:
        if isinstance(event, events.Wait):
            if event.of in at:
                steps.append(Wait((at[event.of],)))
        elif not isinstance(event, events.Op):
            at[event.index] = len(steps)
            if event.op in ("send", "recv"):
                steps.append(Post(event.op, event.peer, (event.group, event.tag), place=event.place))
            else:
                key = (event.group, event.sequence)
                steps.append(Post(event.op, key=key, members=tuple(event.ranks), place=event.place))
    return steps


def of_ledger(ledger: Sequence[Any]) -> Program:
    """A ledger does not know where a rank waited for what it started: the end is assumed."""
    steps: Program = []
    open_posts: list[int] = []
    for entry in ledger:
        if entry.state == "refused":
            continue
        position = len(steps)
        if entry.op in ("send", "recv"):
            peer = None if entry.any_source else entry.root
            steps.append(Post(entry.op, peer, (entry.group, entry.tag), place=entry.place))
        else:
            key = (entry.group, entry.sequence)
            steps.append(Post(entry.op, key=key, members=entry.ranks, place=entry.place))
        if entry.blocking:
            steps.append(Wait((position,)))
        else:
            open_posts.append(position)
    return [*steps, Wait(tuple(open_posts))] if open_posts else steps


def doing(post: Post) -> str:
    """A post in words: "send to rank 2 (cell 3, line 4)"."""
    peer = {
        "send": f" to rank {post.peer}",
        "recv": f" from {'any' if post.peer is None else f'rank {post.peer}'}",
    }
    place = f" ({readable(post.place)})" if post.place else ""
    return f"{post.kind}{peer.get(post.kind, '')}{place}"
