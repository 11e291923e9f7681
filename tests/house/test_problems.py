"""Every reported problem that is kept in tests/data has a test, and names its source."""

import re

import pytest

from tests.problems import problems


@pytest.mark.parametrize("row", problems(), ids=lambda row: row["id"])
def test_every_reported_problem_has_a_test_and_a_source(row, repo):
    asked = {
        name
        for file in (repo / "tests").rglob("test_*.py")
        for name in re.findall(r'problem\("(\w+)"\)', file.read_text(encoding="utf-8"))
    }
    assert row["id"] in asked, f"no test calls problem({row['id']!r}): {row['title']}"
    assert row["url"].startswith("https://") and row["cause"] and row["right_answer"]
