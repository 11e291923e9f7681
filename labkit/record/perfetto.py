"""A replay as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format", Google, 2016. Per rank a process, per stream a thread, per span a complete event
("X"), and per message an arrow ("s" to "f"). Times are microseconds with three decimals, so whole nanoseconds, as
Perfetto keeps them. Left out: Perfetto's own binary format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from labkit.ranks.places import readable
from labkit.record.events import RankRecord
from labkit.record.timeline import Replay, Span


def save_trace(played: Replay, path: str | os.PathLike, records: Sequence[RankRecord] = ()) -> Path:
    """Write `trace_json` to a file, and give its path."""
    path = Path(path)
    path.write_text(trace_json(played, records), encoding="utf-8")
    return path


def trace_json(played: Replay, records: Sequence[RankRecord] = ()) -> str:
    """The same replay gives the same text, to the byte.

    records: those that were replayed; with them each event also says its place, FLOPs and bytes.
    """
    threads = _threads(played)
    events = _names(threads)
    for span in played.spans:
        events.append(_complete(span, threads[span.rank, span.stream], records))
    for number, message in enumerate(played.messages):
        start, end = _ns(message.start_s), _ns(message.end_s)
        if end > start:
            arrow = {"cat": "message", "name": "message", "id": number + 1}
            sent, received = threads[message.source, "send"], threads[message.destination, "recv"]
            events.append({"ph": "s", **arrow, "ts": start / 1000, **sent})
            events.append({"ph": "f", "bp": "e", **arrow, "ts": start / 1000, **received})
    # One event a line: a text that can be compared and looked at.
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ns","traceEvents":[\n{lines}\n]}}\n'


def _threads(played: Replay) -> dict[tuple[int, str], dict[str, int]]:
    """pid and tid by rank and stream. From 1 on: process 0 and thread 0 are the idle ones to Perfetto."""
    streams: dict[int, set[str]] = {rank: {"compute"} for rank in range(played.world_size)}
    for span in played.spans:
        streams[span.rank].add(span.stream)
    threads: dict[tuple[int, str], dict[str, int]] = {}
    for rank, names in streams.items():
        for name in sorted(names, key=lambda name: (not name.startswith("compute"), name.startswith("group"), name)):
            threads[rank, name] = {"pid": rank + 1, "tid": len(threads) + played.world_size + 1}
    return threads


def _names(threads: dict[tuple[int, str], dict[str, int]]) -> list[dict]:
    """What the processes and threads are called, and in which order they stand."""
    events = []
    for (rank, stream), ids in threads.items():
        if stream == "compute":
            events.append({"ph": "M", "name": "process_name", **ids, "args": {"name": f"rank {rank}"}})
            events.append({"ph": "M", "name": "process_sort_index", **ids, "args": {"sort_index": rank}})
        events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": stream}})
        events.append({"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": ids["tid"]}})
    return events


def _complete(span: Span, ids: dict[str, int], records: Sequence[RankRecord]) -> dict:
    start, end = _ns(span.start_s), _ns(span.end_s)
    args: dict[str, object] = {"event": span.event}
    if records:
        event = records[span.rank].events[span.event]
        for name in ("flops", "read_bytes", "written_bytes", "num_bytes"):
            if value := getattr(event, name, 0):
                args[name] = value
        if event.place:
            args["place"] = readable(event.place)
    name = f"wait for {span.label}" if span.kind == "wait" else span.label
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": span.kind, "name": name, **times, **ids, "args": args}


def _ns(time_s: float) -> int:
    """Whole nanoseconds. Rounding keeps the order of times, so spans that follow one another do not overlap."""
    return round(time_s * 1e9)
