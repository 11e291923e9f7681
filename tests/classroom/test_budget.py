"""The budget of a lab: what counts, and that each limit is told."""

from labkit.classroom import budget


def lab(code, text):
    make = [("code", c) for c in code] + [("markdown", t) for t in text]
    return {"cells": [{"cell_type": kind, "id": f"c{i}", "source": [s]} for i, (kind, s) in enumerate(make)]}


FINE_CODE, FINE_TEXT = ["a\nb\nc\nd"] * 25, ["word " * 30] * 25


def test_a_lab_within_its_budget_has_no_finding():
    assert budget.over_budget(lab(FINE_CODE, FINE_TEXT)) == []


def test_each_limit_is_told():
    found = budget.over_budget(lab(FINE_CODE[:5], FINE_TEXT[:5]))
    assert found == ["10 cells; 40 to 60"]
    found = budget.over_budget(lab([*FINE_CODE, "x\n" * 26], [*FINE_TEXT, "word " * 151]))
    assert found == ["code cell c25: 26 lines; at most 25", "text cell c51: 151 words; at most 150"]
    found = budget.over_budget(lab(["a\n" * 9] * 25, ["word"] * 25))
    assert found == ["code cells: median 9 lines; 3 to 5", "text cells: median 1 words; 15 to 45"]


def test_comments_empty_lines_and_addresses_are_not_counted():
    assert budget.code_lines("# why\n\nx = 1  # what\n    # more\ny = 2\n") == 2
    assert budget.text_words("## A title: two words | - [link](https://example.org/a/b) 42") == 5
