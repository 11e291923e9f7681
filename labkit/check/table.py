"""Plain tables for a terminal: progress over all labs.

Left out: colours and widths of terminals; the tables are narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from labkit.check import find


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart, under a ruled head."""
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def progress_table(data: dict) -> str:
    """Every exercise of the installed labs with its state, the sum of points, and how good the predictions
    were.
    """
    exercises = [e for number in find.labs() for e in find.lab(number).EXERCISES]
    known = {e.id for e in exercises}
    rows = [_row(e.id, e.title, e.points, data["exercises"].get(e.id)) for e in exercises]
    rows += [_row(i, "", d["possible"], d) for i, d in sorted(data["exercises"].items()) if i not in known]
    earned = sum(d["score"] for d in data["exercises"].values())
    possible = sum(e.points for e in exercises) + sum(
        d["possible"] for i, d in data["exercises"].items() if i not in known
    )
    lines = [
        table(("exercise", "title", "points", "state", "tries", "last tried"), rows),
        f"{earned:g} of {possible:g} points",
    ]
    errors = [p["log_error"] for p in data["predictions"].values() if p["log_error"] is not None]
    if data["predictions"]:
        count = len(data["predictions"])
        lines.append(f"{count} prediction{'' if count == 1 else 's'}" + _typical(errors))
    return "\n".join(lines)


def _row(exercise_id: str, title: str, points: float, entry: dict | None) -> tuple[str, ...]:
    if entry is None:
        return exercise_id, title, f"0/{points:g}", "not attempted", "0", ""
    state = "passed" if entry["passed"] else entry["cause"] or "interrupted"
    when = entry["last_tried"].replace("T", " ").removesuffix("+00:00")
    return exercise_id, title, f"{entry['score']:g}/{points:g}", state, str(entry["attempts"]), when


def _typical(errors: list[float]) -> str:
    return f", typically off by a factor of {10 ** median(errors):.2g}" if errors else ""
