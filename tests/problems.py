"""Problems that people reported, with cause and right answer: tests/data/reported_problems.json, one test or more each.

A test that answers one says so by `problem("C01")`; tests/house/test_problems.py holds that none is forgotten. Left out
of the file: problems of rooms and labs that do not exist yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "reported_problems.json"


def problems() -> list[dict[str, Any]]:
    """All that are kept here, in the order of the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def problem(name: str) -> dict[str, Any]:
    """The reported problem with this id. Raises KeyError when the file has none."""
    return {row["id"]: row for row in problems()}[name]
