"""What a rank's record says of an answer of lab 06: its collectives in forward and backward, FLOPs, bytes kept.

Left out: whether values are right (`told`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import labkit.labs.lab02.average_waits as waits
import labkit.labs.lab06.in_rank as in_rank
from labkit.check.evidence import Observed
from labkit.check.exercise import Verdict, wrong
from labkit.labs.lab04.training import held_at
from labkit.record.events import RankRecord

SPARE_BYTES = 4096  # a rank may keep beside its parameters: masks, positions, buffers of a few numbers


@dataclass(frozen=True)
class Part:
    """Where in a record one call has its forward (begin to middle) and its backward (middle to end)."""

    begin: int
    middle: int
    end: int


def parts(record: RankRecord, count: int, made: bool = True) -> list[Part]:
    """Of `count` calls; fewer where a mark is missing. made: two marks stand before them, of the making of a module."""
    found = in_rank.marks(record)[2 * made :]
    return [Part(*found[3 * n : 3 * n + 3]) for n in range(count) if len(found) >= 3 * n + 3]


def kept_bytes(record: RankRecord) -> int:
    """Bytes that making the answer left behind, the serial module being gone."""
    first, made = in_rank.marks(record)[:2]
    return held_at(record, made) - held_at(record, first)


def between(record: RankRecord, begin: int, end: int) -> list[Any]:
    """Communications between two events."""
    return [event for event in record.communications if begin < event.index <= end]


def flops(record: RankRecord, begin: int, end: int) -> int:
    """FLOPs of the ops between two events."""
    return sum(op.flops for op in record.ops if begin < op.index <= end)


def largest_made(record: RankRecord, begin: int, end: int) -> int:
    """Bytes of the largest storage made between two events."""
    return max((delta.num_bytes for delta in record.deltas if begin < delta.index <= end), default=0)


def words(events: list[Any]) -> str:
    """Communications in words: "2 all_reduce (768 and 24 bytes)"."""
    if not events:
        return "nothing"
    ops = list(dict.fromkeys(event.op for event in events))
    told = []
    for op in ops:
        sizes = [event.num_bytes for event in events if event.op == op]
        told.append(f"{len(sizes)} {op} ({' and '.join(map(str, sizes[:4]))}{' ...' * (len(sizes) > 4)} bytes)")
    return ", ".join(told)


def recorded(observed: Observed, count: int, tried: str, made: bool = True) -> Verdict | None:
    """Whether every rank's record shows all calls."""
    for rank, record in enumerate(observed.records):
        if record is None or len(parts(record, count, made)) != count:
            sentence = f"the record of rank {rank} does not show the {count} calls that it was led through."
            return wrong("evidence", "no_record", sentence, tried)
    return None


def waited(observed: Observed, tried: str, stage: str = "evidence") -> Verdict | None:
    """Whether everything that was sent was waited for before it was used. Cause "not_waited"."""
    found = waits.not_waited(observed)
    if found is None:
        return None
    rank, op, used = found
    what = "its result is used before it is there" if used else "nothing waits for it"
    sentence = f"with async_op=True {op} returns at once, and {what}: call wait() on what it returns."
    return wrong(stage, "not_waited", sentence, tried, f"rank {rank}: {op} without wait()", "wait(), then use")


def kept_share(observed: Observed, due: int, whole: int, tried: str) -> Verdict | None:
    """A rank keeps `due` bytes of parameters and little else. Causes "whole_kept" (whole: of the serial module)."""
    for rank, record in enumerate(observed.records):
        kept = kept_bytes(record)
        if kept > due + SPARE_BYTES:
            sentence = f"rank {rank} keeps more than its part: a slice is a view and holds the whole weight: clone() it"
            if kept < whole:
                sentence += " (or what else is kept?)"
            return wrong("evidence", "whole_kept", f"{sentence}.", tried, f"{kept} bytes", f"{due} bytes")
    return None


def work_is_cut(observed: Observed, due: list[int], count: int, tried: str) -> Verdict | None:
    """Forward FLOPs of every call are those due. Cause "whole_product": the rank computes what others compute too."""
    for rank, record in enumerate(observed.records):
        for number, part in enumerate(parts(record, count)):
            got = flops(record, part.begin, part.middle)
            if got > 1.02 * due[number]:
                sentence = f"rank {rank} computes more than its part of the product: the work is not cut."
                return wrong("evidence", "whole_product", sentence, tried, f"{got} FLOPs forward", f"{due[number]}")
    return None
