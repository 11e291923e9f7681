"""The cells of a lab's source, so that a slide can run what a cell defines and name the cell.

A cell is named by its section and by a word of its code: a function that it defines, or the name of a prediction or
a check. Left out: running whole cells, which may time things.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Cell:
    """kind: "markdown" or "code". section: the number of the last `## 4 · ...` before it, 0 before the first."""

    kind: str
    section: int
    exercise: str
    text: str


def source_of(lab: str) -> Path:
    """The source of a lab's notebook; lab: its two digits, "00"."""
    return ROOT / "notebooks" / "source" / f"lab{lab}.py"


def cells(lab: str) -> list[Cell]:
    """Every cell of a lab's source, in order."""
    found, section = [], 0
    for part in re.split(r"^# %%", source_of(lab).read_text(encoding="utf-8"), flags=re.M)[1:]:
        mark, _, text = part.partition("\n")
        kind = "markdown" if "[markdown]" in mark else "code"
        if kind == "code":
            exercise = re.search(r'exercise="([\d.]+[a-z]?)"', mark)
            found.append(Cell(kind, section, exercise[1] if exercise else "", text.strip("\n")))
            continue
        text = re.sub(r"^# ?", "", text, flags=re.M)
        for block in re.split(r"^(?=## \d)", text, flags=re.M):  # one cell may end a section and begin the next
            heading = re.match(r"## (\d+)", block)
            section = int(heading[1]) if heading else section
            found.append(Cell(kind, section, "", block.strip("\n")))
    return found


def named(lab: str, section: int, word: str) -> bool:
    """Whether a code cell of that section has `word` in it: a name, or a string such as "0.rounds"."""
    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
    return any(cell.kind == "code" and cell.section == section and whole.search(cell.text) for cell in cells(lab))


def exercises(lab: str) -> list[str]:
    """Ids of the exercises, in the notebook's order."""
    return [cell.exercise for cell in cells(lab) if cell.exercise]


def minutes(lab: str, exercise: str) -> str:
    """How long an exercise takes, as the notebook says it: "12". Raises ValueError when it does not."""
    for cell in cells(lab):
        if found := re.search(rf"\*\*Exercise {re.escape(exercise)}: .*?\*\* \((\d+) min", cell.text):
            return found[1]
    raise ValueError(f"lab {lab} does not say how many minutes exercise {exercise} takes")


def value(lab: str, name: str) -> Any:
    """The number, text, list or dictionary that a cell first gives to `name`. ValueError when none does."""
    for node in ast.parse(source_of(lab).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise ValueError(f"no cell of {source_of(lab).name} gives a value to {name}")


def function(lab: str, name: str) -> Any:
    """What a code cell of the lab's source defines at its top level as `name`, with the notebook's imports.

    Raises ValueError when no cell defines it. Its file and lines are those of the source.
    """
    path = source_of(lab)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    mine = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name]
    if not mine:
        raise ValueError(f"no cell of {path.name} defines {name}")
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    space: dict[str, Any] = {"__name__": f"lab{lab}"}
    exec(compile(ast.Module([*imports, *mine], []), str(path), "exec"), space)
    import labkit

    space["labkit"] = labkit  # the notebook's setup cell imports it
    return space[name]
