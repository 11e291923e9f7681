"""Replay: the record of every rank, played again in virtual time on a cluster that is only described.

Per rank a compute stream (more where a record has more CUDA streams), one communication stream per group, and one
send and one receive port on which messages queue. A communication starts when its last member has issued it and its
streams are free; a wait joins it to the compute stream. Nothing is measured, so the same records give the same
replay on any machine, to the last digit. Left out: pipeline schedules (a record is played as it is), congestion
inside a switch, and what a rank does between two ops.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.ranks.places import readable
from labkit.record.engine import Engine
from labkit.record.events import Collective, RankRecord
from labkit.record.prices import Prices, counting_rounds, prices
from labkit.record.timeline import Finding, Message, Replay, Span

__all__ = ["Finding", "Message", "Prices", "Replay", "Span", "counting_rounds", "prices", "replay"]

SENDS = ("rendezvous", "eager")


def replay(records: Sequence[RankRecord], prices: Prices, sends: str = "rendezvous") -> Replay:
    """Play `records` (one per rank, in rank order) at `prices`.

    sends: "rendezvous" (a message starts when both ends are there: gloo, and large NCCL messages) or "eager" (it
    starts when it is sent and lies ready for its receiver; the send is over when its bytes have left).
    Raises ValueError for records that are not those of ranks 0 ... n-1, and for another `sends`.
    """
    ranks = [record.rank for record in records]
    if ranks != list(range(len(records))) or not ranks:
        raise ValueError(f"records are of ranks {ranks}; give one record per rank, in rank order")
    if sends not in SENDS:
        raise ValueError(f"sends is {sends!r}; it can be {' or '.join(SENDS)}")
    engine = Engine(records, prices, sends == "eager")
    engine.run()
    ends = [span.end_s for span in engine.spans] + [stream.now for streams in engine.streams for stream in streams]
    spans = sorted(engine.spans, key=lambda span: (span.rank, span.start_s, span.end_s, span.stream, span.event))
    told = _findings(engine, records), _deadlock(engine, records)
    return Replay(len(records), max(ends), tuple(spans), _messages(engine), *told)


def _messages(engine: Engine) -> tuple[Message, ...]:
    """By when they began, then by source and destination."""
    found = []
    for (rank, index), communication in engine.meetings.of.items():
        source, destination = communication.expected if communication.is_message else (None, None)
        if rank == source and communication.end_s is not None and not communication.missing():
            recv, _ = communication.members[destination]
            times = communication.start_s, communication.end_s
            found.append(Message(source, destination, index, recv, *times))
    return tuple(sorted(found, key=lambda m: (m.start_s, m.source, m.destination, m.send)))


def _stuck(engine: Engine, rank: int) -> list:
    """(stream, the event it cannot get past) of a rank's streams."""
    return [(stream, stream.events[stream.at]) for stream in engine.streams[rank] if stream.at < len(stream.events)]


def _findings(engine: Engine, records: Sequence[RankRecord]) -> tuple[Finding, ...]:
    found = []
    for (rank, index), communication in sorted(engine.meetings.of.items(), key=lambda item: item[0]):
        if index not in engine.waited[rank] and not _stuck(engine, rank):
            doing = _doing(records[rank], index)
            found.append(Finding("never_waited", rank, index, f"rank {rank} never waited for {doing}"))
        if others := communication.missing():
            sentence = f"rank {rank} issued {_doing(records[rank], index)}, but {_ranks(others)} never did"
            found.append(Finding("unmatched", rank, index, sentence))
    return tuple(found)


def _deadlock(engine: Engine, records: Sequence[RankRecord]) -> str:
    """Who waits for whom, when somebody still does."""
    parts, awaited = [], set()
    for rank, record in enumerate(records):
        for _, event in _stuck(engine, rank):
            communication = engine.meetings.of.get((rank, getattr(event, "of", -1)))
            if communication is not None and communication.missing():
                awaited.update(communication.missing())
                doing = _doing(record, event.of)
                parts.append(f"rank {rank} waits for {_ranks(communication.missing())} in {doing}")
    done = [rank for rank in sorted(awaited - {None}) if rank < len(records) and not _stuck(engine, rank)]
    return "; ".join([*parts, *(f"rank {rank} is done" for rank in done)])


def _ranks(ranks: Sequence[int | None]) -> str:
    if None in ranks:
        return "any rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _doing(record: RankRecord, index: int) -> str:
    """A communication in the reader's terms: "all_reduce #4 (cell 12, line 3)", "send to rank 1 (train.py, line 7)"."""
    event = record.events[index]
    if isinstance(event, Collective):
        part = "" if len(event.ranks) == record.world_size else f" of {_ranks(event.ranks)}"
        what = f"{event.op} #{event.sequence}{part}"
    else:
        what = f"{event.op} #{event.order} {'to' if event.op == 'send' else 'from'} {_ranks([event.peer])}"
    return f"{what} ({readable(event.place)})" if event.place else what
