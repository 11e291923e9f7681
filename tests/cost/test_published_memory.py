"""Published figures of parameters, memory and FLOPs come out; and it is counted which do not, and why."""

from collections import Counter

import pytest

from tests.cost import published_memory as published

COVERED = [row for row in published.rows() if not published.reason(row)]


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row["id"])
def test_a_published_figure_comes_out(row):
    rel, absolute = row["rtol"], row["atol"]
    if rel is None and absolute is None:
        rel = 2e-3  # Megatron-LM's report, which leaves norms and biases out
    assert published.work_out(row)(row) == pytest.approx(row["expected"], rel=rel or 0, abs=absolute or 0)


def test_every_row_is_covered_or_left_out_with_a_reason():
    assert [row["id"] for row in published.rows() if not (published.work_out(row) or published.reason(row))] == []


def test_how_many_are_covered_by_kind():
    count = Counter(row["kind"] for row in COVERED)
    reasons = Counter(published.reason(row) for row in published.rows() if published.reason(row))
    print(f"published figures: {dict(count)}; left out: {dict(reasons)}")
    assert dict(count) == {
        "exact": 26,
        "formula-in-paper": 135,
        "measured": 70,
        "figure-readoff": 11,
        "tool-output": 22,
    }
    assert sorted(reasons.values()) == [1, 19]
