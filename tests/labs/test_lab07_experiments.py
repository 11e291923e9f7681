"""Lab 07's experiments: schedules measured beside theory, and the pipelines of torch and DeepSpeed."""

import importlib.util
import re

import pytest

from labkit.cli import experiments
from labkit.labs import lab07
from labkit.labs.lab07 import measured, pictures
from labkit.record.events import RankRecord, Wait
from labkit.schedule import theory
from labkit.schedule.actions import most_kept

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="waits for deepspeed: pip install deepspeed"
)


def cells(line):
    return re.split(r"  +", line.strip())


def test_the_labs_experiments_are_these_three_and_its_docstring_names_them():
    assert sorted(experiments(lab07)) == ["pipeline_module", "pipelining", "schedules"]
    assert all(f"lab07.{name}" in lab07.__doc__ for name in experiments(lab07))


def test_recorded_schedules_idle_as_in_theory_when_replayed_and_keep_what_is_in_flight():
    found = measured.measured(2, 4, width=128, rows=32)
    assert [each.name for each in found] == ["GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-V"]
    due = [theory.idle_share(2, 4), theory.idle_share(2, 4), theory.idle_share(2, 4, 2)]
    assert [each.theory for each in found[:3]] == due
    for each in found:
        assert each.replayed == pytest.approx(each.theory, abs=0.01), each.name
        assert 0 < each.clock < 1
    one = measured.LAYERS * 32 * 128 * 4
    kept = [each.kept_bytes / one for each in found]
    due = [most_kept(schedule)[0] for schedule, *_ in pictures.five(2, 4)]
    due[-1] += 1 / measured.LAYERS  # ZB-V's rank 0 has what the loss is taken of; losses are 4 bytes each
    assert kept == pytest.approx(due, abs=1e-3)
    assert kept[1] < kept[2] < kept[0], "interleaved keeps more than 1F1B"


def record(rank, began_s, time_s, *waits):
    events = tuple(Wait(i, 0, "call", True, start, end, "") for i, (start, end) in enumerate(waits))
    return RankRecord(rank, 2, events, (), (), 0, 0, 0, (), began_s, time_s)


def test_idle_by_the_clock_is_waiting_coming_late_and_being_done_early():
    # From 10 to 20 s. Rank 0 computes 10 - 1 - 2 s; rank 1 comes at 11, is done at 18, and waits for 3 s of that.
    records = [record(0, 10.0, 10.0, (1, 2), (4, 6)), record(1, 11.0, 7.0, (0, 3))]
    assert measured.idle_by_clock(records) == pytest.approx(1 - (7 + 4) / 20)
    assert measured.idle_by_clock([record(0, 5.0, 2.0)]) == 0


def test_the_table_has_a_row_for_each_schedule_and_says_when_ranks_take_turns(monkeypatch, capsys):
    asked = []

    def made(ranks, microbatches):
        asked.append((ranks, microbatches))
        return (measured.Measured("1F1B", 0.25, 0.26, 0.5, 3_000_000),)

    monkeypatch.setattr(measured, "measured", made)
    for cores, told in ((2.0, "There are 2 cores, so the 3 ranks take turns"), (3.0, "")):
        monkeypatch.setattr("labkit.labs.lab07.experiments.usable_cores", lambda cores=cores: cores)
        lab07.schedules(3, 6)
        first, _, _, row, *last = capsys.readouterr().out.splitlines()
        assert first.startswith("3 ranks, 6 microbatches")
        assert cells(row) == ["1F1B", "25.0%", "26.0%", "50.0%", "3.00"]
        assert len(last) == bool(told) and "".join(last).startswith(told)
    assert asked == [(3, 6)] * 2


def test_torchs_schedules_train_as_one_worker_does(capsys):
    lab07.pipelining(2, 4, steps=2)
    serial, *rows = [cells(line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["ScheduleGPipe", "Schedule1F1B"]
    for row in rows:
        assert row[1:3] == serial[1:3] and float(row[3]) < 2e-5
        kept = [int(each.replace(",", "")) for each in row[4].split(", ")]
        assert len(kept) == 2 and sum(kept) == int(serial[4].replace(",", ""))


@needs_deepspeed
def test_deepspeeds_module_trains_as_one_worker_does_and_refuses_zero_2_and_3(capsys):
    lab07.pipeline_module(2, 2, steps=2)
    lines = capsys.readouterr().out.splitlines()
    serial, row = cells(lines[2]), cells(lines[3])
    assert row[0] == "PipelineModule" and row[1:3] == serial[1:3] and float(row[3]) < 2e-5
    assert lines[4] == "with ZeRO stage 1: taken"
    assert all("incompatible with pipeline parallelism" in line for line in lines[5:]) and len(lines) == 7


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: lab07.schedules(1), "ranks is a whole number, 2 to 16, not 1; ranks=4 would do"),
        (lambda: lab07.schedules(4, 6), "groups of 4, and 6 is no multiple; microbatches=8 would do"),
        (lambda: lab07.schedules(3, 0), "microbatches is a whole number, 1 or more, not 0; microbatches=6 would do"),
        (lambda: lab07.pipelining(8), "ranks is a whole number, 2 to 4, not 8"),
        (lambda: lab07.pipelining(4, 3), "microbatches is a whole number, 4 or more, not 3"),
        (lambda: lab07.pipeline_module(steps=0), "steps is a whole number, 1 or more, not 0"),
        (lambda: pictures.five(4, 6), "6 is no multiple of 4 ranks"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_rank_starts(call, message, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a rank was started")

    monkeypatch.setattr("labkit.ranks.launch.launch", refuse)
    monkeypatch.setattr(measured, "launch", refuse)
    with pytest.raises(ValueError, match=message):
        call()
