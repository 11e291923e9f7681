"""This laptop measured by real ranks: figures that can be, kept and found again. Left out: how good they are."""

import dataclasses

import pytest

from labkit.cost import laptop as kept
from labkit.cost.laptop import cluster_of
from labkit.record import laptop as measuring
from labkit.record.laptop import Reading, laptop, summed_up
from labkit.record.prices import prices
from tests.record.played import collective


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(measuring, "BUSY_S", 0.02)


def never(*_, **__):
    raise AssertionError("measured again")


def test_it_is_measured_once_with_busy_ranks_and_kept(monkeypatch):
    found = laptop(2)
    assert (found.num_ranks, found.cores) == (2, measuring.usable_cores())
    assert 1e8 < found.flops < 1e13 and 1e8 < found.memory_bandwidth < 1e13
    assert 0 < found.alpha_s < 1 and 1e6 < found.bandwidth < 1e12
    monkeypatch.setattr(measuring, "launch", never)
    assert laptop(2) == laptop(2, found.cores) == found
    for other in ({"num_ranks": 3}, {"num_ranks": 2, "again": True}, {"num_ranks": 2, "cores": found.cores + 1}):
        with pytest.raises(AssertionError, match="measured again"):
            laptop(**other)


def fixed(monkeypatch, *rows):
    given = [
        [Reading(measuring.PRODUCT_FLOPS / flops, measuring.SUM_BYTES / memory, small_s, large_s, small_s)]
        for flops, memory, small_s, large_s in rows
    ]
    monkeypatch.setattr(measuring, "launch", lambda fn, n, **_: given)


def test_its_all_reduce_costs_what_was_measured(monkeypatch):
    small_s, large_s = 1e-3, 20e-3
    fixed(monkeypatch, *[(1e9, 2e9, small_s, large_s)] * 4)
    on = prices(cluster_of(laptop(4, 2)))
    for num_bytes, time_s in ((measuring.LARGE, large_s), (measuring.SMALL, small_s)):
        assert sum(on.collective(collective(range(4), num_bytes))) == pytest.approx(time_s, rel=1e-3)


def readings(*rounds):
    """Readings of ranks: a tuple per round, of (seconds of everything, of a core's time in both all_reduces)."""
    return [[Reading(s, s, s, 2 * s, cpu_s) for s, cpu_s in rank] for rank in zip(*rounds, strict=True)]


def test_figures_are_those_of_the_slowest_rank_in_the_middle_round():
    found = summed_up(readings([(1, 1), (2, 1)], [(4, 1), (3, 1)], [(90, 1), (3, 1)]), 2)
    assert found.flops == measuring.PRODUCT_FLOPS / 4
    assert found.memory_bandwidth == measuring.SUM_BYTES / 4


def test_a_share_of_a_core_is_what_communicating_takes_and_no_more_than_there_is():
    assert summed_up(readings([(1, 1.5), (1, 1.5)]), 2).busy_share == 0.5
    assert summed_up(readings([(1, 3.0), (1, 3.0)]), 2).busy_share == 1.0
    assert summed_up(readings(*[[(1, 3.0)] * 4]), 2).busy_share == 0.5


def test_a_lone_rank_has_no_link():
    found = summed_up(readings([(1, 0)]), 2)
    assert (found.alpha_s, found.busy_share) == (0, 0)


def test_a_large_all_reduce_that_seems_faster_than_a_small_one_is_no_error(monkeypatch):
    fixed(monkeypatch, *[(1e9, 2e9, 2e-3, 1e-3)] * 2)
    assert laptop(2, 2).bandwidth > 0


def test_a_home_that_cannot_be_written_is_told_once_and_the_figures_are_given(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "file"))
    fixed(monkeypatch, *[(1e9, 2e9, 1e-3, 2e-3)] * 2)
    with pytest.warns(UserWarning, match="cannot be written") as told:
        assert laptop(2, 2).flops == pytest.approx(1e9)
    assert len(told) == 1


def test_it_can_be_measured_again_and_replaces_what_was_kept(monkeypatch):
    fixed(monkeypatch, *[(1e9, 2e9, 1e-3, 2e-3)] * 2)
    first = laptop(2, 2)
    fixed(monkeypatch, *[(5e9, 2e9, 1e-3, 2e-3)] * 2)
    assert laptop(2, 2) == first != laptop(2, 2, again=True)
    assert kept.load(2, 2.0) == dataclasses.replace(kept.load(2, 2.0), flops=5e9)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="num_ranks is 1 or more, not 0"):
        laptop(0)
