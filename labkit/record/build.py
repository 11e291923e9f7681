"""From the raw rows of a trace to a frozen RankRecord, after the timed region.

Here sequence numbers are given, waits that C++ made and nothing showed are entered at the end, and places get
their names. Left out: the recording itself (`trace`).
"""

from __future__ import annotations

from collections import defaultdict

from labkit.record.events import Collective, Delta, Op, PointToPoint, RankRecord, Wait
from labkit.record.kinds import kinds_of, owners_of
from labkit.record.places import named


def build_record(mode, labels, rank: int, world_size: int, start_ns: int, end_ns: int) -> RankRecord:
    """The record of a trace whose mode has been left and whose labels are closed."""
    holdings = mode.holdings
    begin, end, peak = holdings.totals()
    events = tuple(_events(mode, start_ns, end_ns))
    deltas = tuple(Delta(*delta) for delta in holdings.deltas)
    births, module_of = holdings.births, mode.running.resolver()
    return RankRecord(
        rank=rank,
        world_size=world_size,
        events=events,
        begin=tuple(holdings.begin),
        deltas=deltas,
        begin_bytes=begin,
        end_bytes=end,
        peak_bytes=peak,
        kinds=kinds_of(
            labels.kinds, births, holdings.begin, deltas, events, labels.buckets, labels.weak, holdings.freed
        ),
        began_s=start_ns / 1e9,
        time_s=(end_ns - start_ns) / 1e9,
        modules=owners_of(labels.owners, births, module_of, labels.names),
    )


class _Clock:
    """Names of places, each found once, and seconds since the trace began."""

    def __init__(self, start_ns: int):
        self.start_ns = start_ns
        self.names: dict = {None: ""}

    def place(self, here) -> str:
        if here not in self.names:
            self.names[here] = named(here)
        return self.names[here]

    def span(self, start: int, end: int, here) -> tuple[float, float, str]:
        return (start - self.start_ns) / 1e9, (end - self.start_ns) / 1e9, self.place(here)


def _events(mode, start_ns: int, end_ns: int) -> list:
    clock = _Clock(start_ns)
    events = []
    sequences: dict[str, int] = defaultdict(int)
    orders: dict[tuple, int] = defaultdict(int)
    for index, row in enumerate(mode.rows):
        if row[0] == "op":
            _, *facts, reads, writes, view, stream, start, end, here = row
            span = clock.span(start, end, here)
            events.append(Op(index, *facts, _once(reads), _once(writes), view, stream, *span))
        elif row[0] == "wait":
            _, of, how, blocking, start, end, here = row
            events.append(Wait(index, of, how, blocking, *clock.span(start, end, here)))
        elif row[1] in ("send", "recv"):
            events.append(_message(mode, index, row, orders, clock))
        else:
            events.append(_collective(mode, index, row, sequences, clock))
    for index in sorted(mode.pending.storages_of):
        if index not in mode.in_python:
            events.append(Wait(len(events), index, "region", False, *clock.span(end_ns, end_ns, None)))
    return events


def _once(numbers: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(number for number in numbers if number >= 0))


def _collective(mode, index: int, row: tuple, sequences: dict, clock: _Clock) -> Collective:
    _, op, call, group, ranks, *sizes, root, _, _, reduce_op, reads, writes, stream, start, end, here = row
    sequence = sequences[group]
    sequences[group] += 1
    return Collective(
        index, op, call, group, ranks, sequence, *sizes, _once(reads), _once(writes), root, reduce_op,
        index in mode.blocking, index in mode.in_python, stream, *clock.span(start, end, here),
    )  # fmt: skip


def _message(mode, index: int, row: tuple, orders: dict, clock: _Clock) -> PointToPoint:
    _, op, call, group, ranks, num_bytes, _, _, _, _, dtype, _, peer, tag, _, reads, writes, *rest = row
    stream, start, end, here = rest
    if peer is None and index in mode.sources:
        peer = ranks[mode.sources[index]]
    order = orders[op, peer]
    orders[op, peer] += 1
    return PointToPoint(
        index, op, call, group, ranks, peer, tag, order, num_bytes, dtype, _once(reads), _once(writes),
        index in mode.blocking, index in mode.in_python, stream, *clock.span(start, end, here),
    )  # fmt: skip
