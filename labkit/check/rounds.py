"""How many rounds a pattern of sends and receives takes, and whether it can hang: point-to-point in virtual
time.

Each message takes one unit of time (alpha 1, beta 0); a rank has one send port and one receive port; a send
finishes only with its recv (rendezvous). So a round is one message in and one out per rank at a time. The
clock is simulated, so the answer does not depend on the machine. Left out: message sizes, links and
compute, which are the business of the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Post:
    """One message end (or a collective, which here takes no time) put forward by a rank.

    kind: "send", "recv" or the name of a collective. peer: the other global rank, None for a recv from
    anyone. key: for a message its tag; for a collective what its members have in common (group, sequence
    number). members: global ranks of a collective, () for a message. place: where it was called.
    """

    kind: str
    peer: int | None = None
    key: object = 0
    members: tuple[int, ...] = ()
    place: str = ""


@dataclass(frozen=True)
class Wait:
    """The rank goes on only when the posts with these positions in its own program have finished."""

    posts: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """What came of a simulation. Times in rounds.

    messages: (start, end, source, destination) of each message that passed.
    stuck: (rank, position of the post it waits for) of every rank that never ended: a deadlock.
    unmatched: (rank, position) of every send or recv without its other end.
    """

    rounds: float
    messages: tuple[tuple[float, float, int, int], ...]
    stuck: tuple[tuple[int, int], ...]
    unmatched: tuple[tuple[int, int], ...]


@dataclass
class _Rank:
    steps: Sequence[Post | Wait]
    at: int = 0
    now: float = 0.0
    posted: dict[int, float] = field(default_factory=dict)  # position -> time
    ended: dict[int, float] = field(default_factory=dict)
    send_free: float = 0.0
    recv_free: float = 0.0


def simulate(programs: Sequence[Sequence[Post | Wait]]) -> Timeline:
    """Run one program per rank to its end, or until nothing can move any more.

    Sends match receives by (source, destination, tag), in order of posting. Of the messages that are ready,
    the one that can start first goes first; ties go to the earlier post, then to the one that stands earlier
    in its sender's program, then in its receiver's (a port keeps the order of its calls), then to the lower
    rank.
    """
    ranks = [_Rank(steps) for steps in programs]
    messages = []
    while True:
        for rank in ranks:
            _advance(rank)
        if _finish_collective(ranks):
            continue
        ready = _ready(ranks)
        if not ready:
            break
        start, _, sent, received, source, destination = min(ready)
        ranks[source].ended[sent] = ranks[source].send_free = start + 1
        ranks[destination].ended[received] = ranks[destination].recv_free = start + 1
        messages.append((start, start + 1, source, destination))
    stuck = [(r, _awaited(rank)) for r, rank in enumerate(ranks) if rank.at < len(rank.steps)]
    unmatched = [
        (r, p) for r, rank in enumerate(ranks) for p in rank.posted if p not in rank.ended and not rank.steps[p].members
    ]
    ends = [end for rank in ranks for end in (*rank.ended.values(), rank.now)]
    return Timeline(max(ends, default=0.0), tuple(messages), tuple(stuck), tuple(unmatched))


def _advance(rank: _Rank) -> None:
    """Let a rank go on until it waits for something that has not finished."""
    while rank.at < len(rank.steps):
        step = rank.steps[rank.at]
        if isinstance(step, Post):
            rank.posted[rank.at] = rank.now
        elif all(p in rank.ended for p in step.posts):
            rank.now = max([rank.now, *(rank.ended[p] for p in step.posts)])
        else:
            return
        rank.at += 1


def _awaited(rank: _Rank) -> int:
    return next(p for p in rank.steps[rank.at].posts if p not in rank.ended)


def _open(rank: _Rank) -> list[tuple[int, Post]]:
    return [(p, rank.steps[p]) for p in rank.posted if p not in rank.ended]


def _finish_collective(ranks: list[_Rank]) -> bool:
    """End the collectives that all members have called: at the time of the last of them."""
    arrived: dict[tuple, list[tuple[int, int]]] = {}
    for r, rank in enumerate(ranks):
        for position, post in _open(rank):
            if post.members:
                arrived.setdefault((post.key, post.members), []).append((r, position))
    finished = False
    for (_, members), calls in arrived.items():
        if {r for r, _ in calls} == set(members):
            end = max(ranks[r].posted[p] for r, p in calls)
            for r, p in calls:
                ranks[r].ended[p] = end
            finished = True
    return finished


def _ready(ranks: list[_Rank]) -> list[tuple[float, float, int, int, int, int]]:
    """(start, time of the later post, send's position, recv's position, source, destination) of all that may go."""
    ready = []
    for destination, rank in enumerate(ranks):
        taken: set[tuple[int, int]] = set()
        for received, recv in _open(rank):
            if recv.kind != "recv":
                continue
            match = _match(ranks, destination, recv, taken)
            if match is None:
                continue
            source, sent = match
            taken.add(match)
            both = max(ranks[source].posted[sent], rank.posted[received])
            start = max(both, ranks[source].send_free, rank.recv_free)
            ready.append((start, both, sent, received, source, destination))
    return ready


def _match(ranks: list[_Rank], destination: int, recv: Post, taken: set) -> tuple[int, int] | None:
    sources = range(len(ranks)) if recv.peer is None else [recv.peer]
    found = [
        (ranks[source].posted[position], source, position)
        for source in sources
        for position, post in _open(ranks[source])
        if post.kind == "send" and post.peer == destination and post.key == recv.key and (source, position) not in taken
    ]
    return min(found)[1:] if found else None
