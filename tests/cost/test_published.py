"""Published figures of links, hardware and collectives come out; and it is counted which do not, and why."""

from collections import Counter

import pytest

from labkit.cost.devices import DEVICES
from tests.cost import published
from tests.cost.published import BELOW, EQUAL, LEFT_OUT, first


def rows(table):
    return [pytest.param(row, id=row["id"]) for row in published.family() if first(table, row)]


@pytest.mark.parametrize("row", rows(EQUAL))
def test_a_published_figure_comes_out(row):
    (work_out,) = first(EQUAL, row)
    rel, absolute = row["rtol"], row["atol"]
    if rel is None and absolute is None:
        rel = 0.02  # specifications, printed to two or three digits
    expected = row["expected"][0] if isinstance(row["expected"], list) else row["expected"]
    assert work_out(row) == pytest.approx(expected, rel=rel or 0, abs=absolute or 1e-5)


@pytest.mark.parametrize("row", rows(BELOW))
def test_what_was_measured_stays_below_what_the_wires_allow(row):
    assert row["expected"] <= published.wires_allow(row, *first(BELOW, row))


@pytest.mark.parametrize("row", [row for row in rows(BELOW) if "nccl." in row.id])
def test_large_messages_reach_more_than_three_quarters_of_what_the_wires_allow(row):
    assert row["expected"] >= 0.75 * published.wires_allow(row, *first(BELOW, row))


def test_reduction_in_the_switch_is_rightly_left_out_for_it_beats_every_ring():
    beats = [row for row in published.family() if row["id"] == "nccl.h200x8.16GiB.all-reduce_NVLS"]
    assert [row["expected"] > published.wires_allow(row, "DGX H200", 16 * 2**30) for row in beats] == [True]


def test_every_row_of_links_hardware_and_collectives_is_covered_once_or_left_out_with_a_reason():
    where = {row["id"]: [bool(first(table, row)) for table in (EQUAL, BELOW, LEFT_OUT)] for row in published.family()}
    assert [row for row, found in where.items() if sum(found) != 1] == []


def test_how_many_are_covered_by_kind():
    tables = {"equal": EQUAL, "below": BELOW, "left out": LEFT_OUT}
    count = {
        name: Counter(row["kind"] for row in published.family() if first(table, row)) for name, table in tables.items()
    }
    reasons = Counter(first(LEFT_OUT, row)[0] for row in published.family() if first(LEFT_OUT, row))
    others = len(published.ROWS) - len(published.family())
    print(f"published figures: {count}; left out: {dict(reasons)}; rows of other formulas: {others}")
    assert {name: dict(kinds) for name, kinds in count.items()} == {
        "equal": {"spec": 22, "formula-in-paper": 11, "measured": 10, "formula-evaluated-here": 2, "published": 5},
        "below": {"measured": 19},
        "left out": {"measured": 10, "published": 3, "spec": 2},
    }
    assert sum(reasons.values()) == 15 and others == 448


def test_every_peak_that_a_row_quotes_is_one_of_ours():
    quoted = {row["inputs"].get("peak") for row in published.ROWS} - {None}
    peaks = [peak for device in DEVICES for _, peak in device.peaks]
    for peak in quoted:
        wanted = peak if peak > 1e6 else peak * 1e12
        assert any(wanted == pytest.approx(ours, rel=1e-3) for ours in peaks), peak
