"""Bytes held over a recorded region, by kind; who holds them at the peak; how much each module has of them.

A storage's kind is the strongest it ever had within the record: parameter, gradient, optimizer, buffer, communication,
activation (made in a forward and kept for a backward), temporary (the rest, also what was held on entry and nothing
explains). Left out: an allocator's own figures (`labkit.record.allocator`) and pictures (`labkit.view.held`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from labkit.record.events import RankRecord
from labkit.record.kinds import KINDS

__all__ = ["KINDS", "Held", "Owner", "at_peak", "by_module", "held"]


@dataclass(frozen=True)
class Held:
    """Bytes held over a recorded region, by kind.

    times_s: of each change, from the region's start, the first being 0.0, where it is as on entry.
    by_kind: per kind (all of KINDS), bytes held from that time on; as many as times_s.
    begin, end, peak: bytes by kind on entry, at the end, and at the moment when the total is largest.
    """

    times_s: tuple[float, ...]
    by_kind: dict[str, tuple[int, ...]]
    begin: dict[str, int]
    end: dict[str, int]
    peak: dict[str, int]
    peak_bytes: int
    peak_time_s: float

    @property
    def total(self) -> tuple[int, ...]:
        """Bytes of all kinds, as many as times_s."""
        return tuple(map(sum, zip(*self.by_kind.values(), strict=True)))

    def at(self, time_s: float) -> dict[str, int]:
        """Bytes by kind at a time from the region's start; as on entry before it."""
        last = 0
        for place, each in enumerate(self.times_s):
            if each > time_s:
                break
            last = place
        return {kind: line[last] for kind, line in self.by_kind.items()}


def held(record: RankRecord) -> Held:
    """Bytes held by kind over a record."""
    kinds = dict(record.kinds)
    now = dict.fromkeys(KINDS, 0)
    for storage, num_bytes in record.begin:
        now[_kind(kinds, storage)] += num_bytes
    times, lines = [0.0], {kind: [num_bytes] for kind, num_bytes in now.items()}
    for time_s, delta in zip(_times(record), record.deltas, strict=True):
        now[_kind(kinds, delta.storage)] += delta.num_bytes
        times.append(time_s)
        for kind, line in lines.items():
            line.append(now[kind])
    totals = list(map(sum, zip(*lines.values(), strict=True)))
    best = totals.index(max(totals))
    begin, peak, end = ({kind: line[i] for kind, line in lines.items()} for i in (0, best, -1))
    by_kind = {kind: tuple(line) for kind, line in lines.items()}
    return Held(tuple(times), by_kind, begin, end, peak, totals[best], times[best])


@dataclass(frozen=True)
class Owner:
    """Storages at the peak that have kind, module, op and place in common.

    module: qualified name of the module that has the parameter (its gradient, its optimizer state), or in whose
    forward or backward the rest was made; "" where none is known. op: that made it, place: the learner's line, both ""
    for what was held on entry. count: storages.
    """

    kind: str
    module: str
    op: str
    place: str
    num_bytes: int
    count: int


def at_peak(record: RankRecord, most: int = 20) -> tuple[Owner, ...]:
    """Who holds bytes when most are held, the largest first; at most `most` lines (0: all of them)."""
    kinds, modules, origins = dict(record.kinds), dict(record.modules), _origins(record)
    found: dict[tuple, list[int]] = {}
    for storage, num_bytes in _at_peak(record).items():
        key = (_kind(kinds, storage), modules.get(storage, ""), *origins.get(storage, ("", "")))
        entry = found.setdefault(key, [0, 0])
        entry[0] += num_bytes
        entry[1] += 1
    owners = [Owner(*key, *counts) for key, counts in found.items()]
    owners.sort(key=lambda owner: (-owner.num_bytes, KINDS.index(owner.kind), owner.module, owner.op, owner.place))
    return tuple(owners[: most or None])


def by_module(record: RankRecord) -> dict[str, dict[str, int]]:
    """At the peak: module's qualified name ("" for none) -> kind -> bytes; kinds of which it has none are left out."""
    kinds, modules = dict(record.kinds), dict(record.modules)
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for storage, num_bytes in _at_peak(record).items():
        found[modules.get(storage, "")][_kind(kinds, storage)] += num_bytes
    return {module: dict(counts) for module, counts in sorted(found.items())}


def _kind(kinds: dict[int, str], storage: int) -> str:
    kind = kinds.get(storage, "temporary")
    return kind if kind in KINDS else "temporary"


def _times(record: RankRecord) -> list[float]:
    """Time of each delta: when the op began that it stands at; never earlier than the one before."""
    events, latest, times = record.events, 0.0, []
    for delta in record.deltas:
        at = events[delta.index].start_s if delta.index < len(events) else record.time_s
        latest = max(latest, at)
        times.append(latest)
    return times


def _at_peak(record: RankRecord) -> dict[int, int]:
    """Bytes by storage when most are held for the first time."""
    total = best = record.begin_bytes
    last = 0  # deltas up to the peak
    for place, delta in enumerate(record.deltas):
        total += delta.num_bytes
        if total > best:
            best, last = total, place + 1
    bytes_of = dict(record.begin)
    for delta in record.deltas[:last]:
        bytes_of[delta.storage] = bytes_of.get(delta.storage, 0) + delta.num_bytes
    return {storage: num_bytes for storage, num_bytes in bytes_of.items() if num_bytes > 0}


def _origins(record: RankRecord) -> dict[int, tuple[str, str]]:
    """(op, place) that made each storage which was not there on entry."""
    before = {storage for storage, _ in record.begin}
    found: dict[int, tuple[str, str]] = {}
    for delta in record.deltas:
        if delta.storage not in before and delta.storage not in found and delta.index < len(record.events):
            event = record.events[delta.index]
            found[delta.storage] = getattr(event, "name", "") or getattr(event, "call", ""), event.place
    return found
