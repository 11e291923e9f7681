"""Which call of one rank meets which call of another: collectives by their number in the group, messages in order.

Left out: when it happens (`engine`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.record.events import Collective, PointToPoint, RankRecord
from labkit.record.prices import Prices


@dataclass(eq=False, slots=True)
class Communication:
    """One collective or message under way.

    key: what its members have in common; expected: their ranks (None: a sender that is not known); members: rank ->
    (event index, when issued). Times in seconds; left_s: what was left at moved_s of its transfer, at full rate.
    """

    key: tuple
    expected: tuple[int | None, ...]
    members: dict[int, tuple[int, float]] = field(default_factory=dict)
    calls: dict[int, Collective | PointToPoint] = field(default_factory=dict)
    number: int = 0  # in the order of becoming able to start
    ready_s: float = 0.0
    latency_s: float = 0.0
    transfer_s: float = 0.0
    streams: tuple[tuple[int, str], ...] = ()
    cards: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()  # of the ranks that share cores, one entry for each
    start_s: float | None = None
    end_s: float | None = None
    left_s: float = 0.0
    moved_s: float = 0.0
    rate: float = 1.0
    version: int = 0

    @property
    def is_message(self) -> bool:
        return self.key[0] == "message"

    def label(self, rank: int) -> str:
        """What it is for one of its ranks: "send", "recv" or the collective's name."""
        return ("send" if rank == self.key[1] else "recv") if self.is_message else self.key[1]

    def stream(self, rank: int) -> str:
        """The port or communication stream that it takes on a rank."""
        return self.label(rank) if self.is_message else f"group {self.key[2]}"

    def missing(self) -> tuple[int | None, ...]:
        """Ranks that have not come."""
        return tuple(rank for rank in self.expected if rank not in self.members)


class Meetings:
    """All communications of a replay. `of`: by (rank, event index), as soon as issued."""

    def __init__(self, records: Sequence[RankRecord], eager: bool):
        self.eager = eager
        self.keys = [keys_of(record) for record in records]
        self.of: dict[tuple[int, int], Communication] = {}
        self.open: dict[tuple, Communication] = {}
        self.number = 0

    def issue(self, rank: int, event: Collective | PointToPoint, time_s: float) -> tuple[Communication, bool]:
        """Put a call forward. Gives the communication, and whether with this call it can start."""
        key = self.keys[rank][event.index]
        found = self.open.get(key)
        if found is None:
            expected = event.ranks if key[0] == "collective" else key[1:3]
            found = self.open[key] = Communication(key, expected)
        found.members[rank] = event.index, time_s
        found.calls[rank] = event
        self.of[rank, event.index] = found
        whole = len(found.members) == len(found.expected)
        if whole:
            del self.open[key]
        if found.is_message and self.eager:
            complete, found.ready_s = rank == key[1], time_s
        else:
            complete, found.ready_s = whole, max(issued for _, issued in found.members.values())
        if complete:
            self.number += 1
            found.number = self.number
        return found, complete

    def price(self, communication: Communication, prices: Prices) -> None:
        """Say how long it takes and what it takes up."""
        calls = communication.calls
        ranks = communication.expected
        if communication.is_message:
            source, destination = ranks
            times = prices.message(source, destination, calls[source].num_bytes)
            communication.cards = prices.nics((source,), (destination,))
        else:
            # Ranks may give different sizes (all_to_all with uneven splits): the largest counts.
            rank = max(calls, key=lambda rank: (calls[rank].num_bytes, -rank))
            times = prices.collective(calls[rank])
            communication.cards = prices.nics(ranks, ranks)
        communication.latency_s, communication.transfer_s = times
        communication.streams = tuple((rank, communication.stream(rank)) for rank in ranks)
        communication.hosts = tuple(host for host in map(prices.host, ranks) if host is not None)


def keys_of(record: RankRecord) -> dict[int, tuple]:
    """What each communication of a record has in common with its other members, by event index.

    Messages of one pair of ranks match in the order of their calls, among those of the same group and tag.
    """
    keys: dict[int, tuple] = {}
    counts: dict[tuple, int] = defaultdict(int)
    for event in record.communications:
        if isinstance(event, Collective):
            keys[event.index] = ("collective", event.op, event.group, event.ranks, event.sequence)
            continue
        pair = (record.rank, event.peer) if event.op == "send" else (event.peer, record.rank)
        keys[event.index] = ("message", *pair, event.group, event.tag, counts[pair, event.group, event.tag])
        counts[pair, event.group, event.tag] += 1
    return keys
