"""Build the two editions of each lab from notebooks/source/labNN.py, a py:percent file.

The learner edition has stubs in place of solutions; the solved edition has the solutions. Both have the
setup cell and the Colab badge, stamped from `[tool.labkit] repository` in pyproject.toml, cell ids that
depend on the source alone, and no outputs: the same source gives the same bytes. In the source, `# %%
exercise="0.2"` opens an exercise's cell and the lines from `# SOLUTION` to `# END SOLUTION` in it are the
solution, in each method where a class is asked for; the title line `# 00 Ranks` names the files, 00_ranks.ipynb.
Left out: any other metadata of cells than `tags`.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

from labkit.check.stubs import init_stub

_YOURS, _INDENT = "  # your code here", "    "
STUB = f"return NotImplemented{_YOURS}"
SETUP = """\
# Installs labkit where it is missing (Colab), then says in one line what this machine has.
import importlib.util, subprocess, sys
if importlib.util.find_spec("labkit") is None:
    wheel = "labkit @ git+{repository}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", wheel], check=True)
import labkit
labkit.about()"""
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_SOLUTION = re.compile(r"^([ \t]*)# SOLUTION[^\n]*\n(.*?)^[ \t]*# END SOLUTION[^\n]*(?:\n|\Z)", re.M | re.S)


def main(check: bool = False, missing: bool = False, root: Path | None = None) -> int:
    """`labkit build`: write every edition; with `check` only compare; with `missing` leave what is there
    alone.

    An edition that was run or answered (it holds outputs) is put aside, not overwritten. Returns the exit
    code; raises ValueError for a source that cannot be built, and when there is no source.
    """
    root = root or find_root()
    stale = 0
    for path, text in editions(root).items():
        there = path.read_text(encoding="utf-8") if path.exists() else None
        name = path.relative_to(root)
        if there == text or (missing and there is not None):
            continue
        if check:
            stale += 1
            reason = "is missing" if there is None else "is not what its source gives (edited by hand, or out of date)"
            print(f"{name} {reason}; edit notebooks/source and run: labkit build")
            continue
        if there is not None and _was_run(there):
            aside = _aside(path)
            os.replace(path, aside)
            print(f"{name} had been run; it is kept as {aside.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
        print(f"built {name}")
    return 1 if stale else 0


def editions(root: Path) -> dict[Path, str]:
    """Path and text of both editions of every source under `root`."""
    sources = sorted((root / "notebooks" / "source").glob("lab[0-9][0-9].py"))
    if not sources:
        raise ValueError(f"{root / 'notebooks' / 'source'} holds no labNN.py to build from")
    repository = repository_of(root)
    texts = {}
    for source in sources:
        cells = _read(source)
        name = _name(source, cells)
        for folder, solved in (("notebooks", False), ("notebooks/solved", True)):
            path = root / folder / f"{name}.ipynb"
            badge = _badge(repository, path.relative_to(root).as_posix())
            notebook = _notebook(_edition(source, cells, solved), repository, badge)
            texts[path] = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return texts


def find_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` that has notebooks/source.

    Raises ValueError when there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "notebooks" / "source").is_dir():
            return folder
    raise ValueError(f"{start} is not inside a clone of the lab: there is no notebooks/source")


def repository_of(root: Path) -> str:
    """The address in `[tool.labkit]` of pyproject.toml. Raises ValueError when it is not there."""
    # Read by hand: tomllib is there from Python 3.11 on only.
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^\[tool\.labkit\]\s*\n(?:(?!\[).*\n)*?repository\s*=\s*"([^"]+)"', text, re.M)
    if found is None:
        raise ValueError(f"{root / 'pyproject.toml'} has no repository in [tool.labkit]")
    return found[1].rstrip("/")


def stubbed(source: str) -> str:
    """An exercise's cell with stubs in place of solutions, as `labkit.check.stubs` knows them."""

    def stub(found: re.Match) -> str:
        line = STUB
        if _enclosing(source[: found.start()], found[1], "def") == "__init__":
            outer = found[1][: -len(_INDENT)]
            line = f"{init_stub(_enclosing(source[: found.start()], outer, 'class'))}{_YOURS}"
        return f"{found[1]}{line}\n"

    return _SOLUTION.sub(stub, source).rstrip("\n")


def solved(source: str) -> str:
    """An exercise's cell without the marks of its solutions."""
    return _SOLUTION.sub(lambda found: found[2], source).rstrip("\n")


def _enclosing(before: str, indent: str, kind: str) -> str:
    """The name in the last line `def NAME` or `class NAME` that is one step to the left of `indent`; "" for none."""
    names = re.findall(rf"^{indent[: -len(_INDENT)]}{kind} (\w+)", before, re.M)
    return names[-1] if names else ""


def _untold_methods(text: str) -> list[str]:
    """Methods of classes in a learner's cell that are no stubs: with one of them, no class is an untouched stub."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    methods = [each for node in classes for each in node.body if isinstance(each, ast.FunctionDef)]
    lines = text.splitlines()
    return [each.name for each in methods if not lines[each.end_lineno - 1].endswith(_YOURS)]


def _read(source: Path) -> list[Any]:
    import jupytext

    return jupytext.read(source, fmt="py:percent").cells


def _name(source: Path, cells: list[Any]) -> str:
    title = re.match(r"#\s+(\d\d)\W+(.+)", cells[0].source) if cells else None
    if title is None or title[1] != source.stem[3:]:
        raise ValueError(f"{source.name}: its first cell must open with a title like '# {source.stem[3:]} Ranks'")
    return f"{title[1]}_{re.sub(r'[^a-z0-9]+', '_', title[2].lower()).strip('_')}"


def _edition(source: Path, cells: list[Any], is_solved: bool) -> list[dict]:
    """Cells as plain data with ids; exercises as a stub or with their solution."""
    built = []
    for number, cell in enumerate(cells):
        text, cell_id = cell.source, f"cell-{number:02d}"
        exercise = cell.metadata.get("exercise")
        if exercise is not None:
            cell_id = f"exercise-{str(exercise).replace('.', '-')}"
            text = _of_exercise(source, exercise, text, is_solved)
        if re.search(r"^\s*# (END )?SOLUTION", text, re.M):
            raise ValueError(f"{source.name}: a # SOLUTION mark stands outside an exercise's cell, or without its end")
        built.append(_cell(cell.cell_type, text, cell_id, cell.metadata.get("tags")))
    ids = [cell["id"] for cell in built]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{source.name}: two cells carry the same exercise")
    return built


def _of_exercise(source: Path, exercise: Any, text: str, is_solved: bool) -> str:
    """An exercise's cell of either edition. Raises ValueError where its stub would not be known for one."""
    count = len(_SOLUTION.findall(text))
    if not count or (count > 1 and not re.search(r"^class ", text, re.M)):
        raise ValueError(f"{source.name}: exercise {exercise} needs one # SOLUTION ... # END SOLUTION")
    learners = stubbed(text)
    if untold := re.search(r"^class ", text, re.M) and _untold_methods(learners):
        raise ValueError(f"{source.name}: exercise {exercise}: {untold[0]} needs a # SOLUTION, as does every method")
    return solved(text) if is_solved else learners


def _cell(kind: str, text: str, cell_id: str, tags: list[str] | None = None) -> dict:
    cell = {"cell_type": kind, "id": cell_id, "metadata": {"tags": tags} if tags else {}}
    cell["source"] = text.splitlines(keepends=True)
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def _notebook(cells: list[dict], repository: str, badge: str) -> dict:
    """Title with its badge, the setup cell, and the rest."""
    title, *rest = cells
    first, *others = "".join(title["source"]).split("\n")
    title = {**title, "source": "\n".join([first, "", badge, *others]).splitlines(keepends=True)}
    setup = _cell("code", SETUP.format(repository=repository), "setup")
    return {"cells": [title, setup, *rest], "metadata": _METADATA, "nbformat": 4, "nbformat_minor": 5}


def _badge(repository: str, path: str) -> str:
    colab = "https://colab.research.google.com"
    target = f"{colab}/github/{'/'.join(repository.split('/')[-2:])}/blob/main/{path}"
    return f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({target})"


def _was_run(text: str) -> bool:
    try:
        cells = json.loads(text)["cells"]
        return any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # not a notebook that we know: keep it


def _aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.mine-{number}.ipynb")).exists():
        number += 1
    return aside


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8", newline="\n")
    os.replace(new, path)
