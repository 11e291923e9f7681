"""The compute streams of a rank, each with its share of the record, and what one needs of another.

On a CPU there is one stream, and its events follow one another. CUDA streams run at the same time: an event waits
for the events on other streams that last wrote what it reads, and for those that still read what it writes. Left
out: what a GPU's streams wait for by events of their own (`Stream.wait_event`), which a record does not see.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.record.events import Event, Op, RankRecord, Wait


@dataclass(eq=False, slots=True)
class Stream:
    """A compute stream of a rank.

    needs: event -> events of other streams that must be done before. needed: events that another stream needs.
    now: seconds, up to which it is played. work: ops that run on shared cores, with the seconds left of each.
    """

    rank: int
    name: str
    events: Sequence[Event]
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    needed: frozenset[int] = frozenset()
    at: int = 0
    now: float = 0.0
    work: deque[tuple[Op, float]] = field(default_factory=deque)
    left_s: float = 0.0
    moved_s: float = 0.0
    rate: float = 1.0
    version: int = 0


def streams_of(record: RankRecord, one: bool = False) -> list[Stream]:
    """The streams of a rank, in the order in which they are first used; at least one. one: all events on one."""
    handles = list(dict.fromkeys(event.stream for event in record.events if not isinstance(event, Wait)))
    if one or len(handles) < 2:
        return [Stream(record.rank, "compute", record.events)]
    of_event = _assigned(record)
    needs = _needs(record, of_event)
    needed = frozenset(index for indexes in needs.values() for index in indexes)
    shares: dict[int, list[Event]] = defaultdict(list)
    for event in record.events:
        shares[of_event[event.index]].append(event)
    names = ["compute", *(f"compute {number}" for number in range(2, len(handles) + 1))]
    return [
        Stream(record.rank, name, shares[handle], needs, needed) for name, handle in zip(names, handles, strict=True)
    ]


def _assigned(record: RankRecord) -> dict[int, int]:
    """The stream of every event. A wait has none of its own: it holds up the stream of what comes next, or, made
    within the issuing call, the stream that issued.
    """
    found: dict[int, int] = {}
    following = 0
    for event in reversed(record.events):
        if isinstance(event, Wait):
            found[event.index] = record.events[event.of].stream if event.blocking else following
        else:
            found[event.index] = following = event.stream
    return found


def _needs(record: RankRecord, of_event: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Per event, the events of other streams that it must come after, by the storages that they share."""
    needs: dict[int, tuple[int, ...]] = {}
    wrote: dict[int, int] = {}
    reading: dict[int, dict[int, int]] = defaultdict(dict)  # storage -> stream -> its last reader since
    for event in record.events:
        if isinstance(event, Wait) or (isinstance(event, Op) and event.view):
            continue
        mine = event.stream
        before = {wrote[s] for s in (*event.reads, *event.writes) if s in wrote}
        before |= {index for s in event.writes for index in reading[s].values()}
        others = tuple(sorted(index for index in before if of_event[index] != mine))
        if others:
            needs[event.index] = others
        for storage in event.reads:
            reading[storage][mine] = event.index
        for storage in event.writes:
            wrote[storage] = event.index
            reading[storage].clear()
    return needs
