"""The labs as built:

committed editions are what their sources give, within budget, and run as they should.
"""

import json
import random
import re

import nbclient
import nbformat
import pytest

from labkit.check import card
from labkit.classroom import budget, build

ROOT = build.find_root(__import__("pathlib").Path(__file__).parent)
EDITIONS = build.editions(ROOT)
LEARNER = [path for path in EDITIONS if path.parent.name == "notebooks"]
SAMPLE = random.Random(20261130).sample(LEARNER, 3)
CHECK = re.compile(r"""\bcheck\(["'](\d+\.\d+[a-z]?)["']\)""")


def run(text, home, monkeypatch):
    """Execute an edition in a kernel of its own; the notebook with its outputs."""
    monkeypatch.setenv("LABKIT_HOME", str(home))
    notebook = nbformat.reads(text, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT / "notebooks")}})
    client.allow_errors = True
    client.execute()
    return notebook


def failed(notebook):
    """(source, error name) of each cell that failed and was not meant to."""
    return [
        (cell.source, output.ename)
        for cell in notebook.cells
        if cell.cell_type == "code" and "raises-exception" not in cell.metadata.get("tags", [])
        for output in cell.outputs
        if output.output_type == "error"
    ]


def checks(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code" and CHECK.search(cell.source)]


@pytest.mark.parametrize("path", EDITIONS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_edition_is_what_its_source_gives(path):
    assert path.exists(), "run: labkit build"
    assert path.read_text(encoding="utf-8") == EDITIONS[path], "run: labkit build"


@pytest.mark.parametrize("path", LEARNER, ids=lambda path: path.stem)
def test_the_lab_is_within_its_budget(path):
    assert budget.over_budget(json.loads(EDITIONS[path])) == []


@pytest.mark.parametrize("path", LEARNER, ids=lambda path: path.stem)
def test_the_learner_edition_fails_in_exactly_its_check_cells(path, tmp_path, monkeypatch, soak):
    if not soak and path not in SAMPLE:
        pytest.skip(f"{', '.join(sorted(p.stem for p in SAMPLE))} are run this time, all of them with --soak")
    notebook = run(EDITIONS[path], tmp_path, monkeypatch)
    wanted = checks(notebook)
    assert failed(notebook) == [(source, "CheckFailed") for source in wanted] and wanted
    told = [
        o.data[card.MIME]["cause"]
        for c in notebook.cells
        for o in c.get("outputs", ())
        if card.MIME in o.get("data", {})
    ]
    assert told == ["not_attempted"] * len(wanted)


@pytest.mark.parametrize("path", LEARNER, ids=lambda path: path.stem)
def test_the_solved_edition_passes_whole_with_every_point(path, tmp_path, monkeypatch, soak):
    if not soak:
        pytest.skip("make test runs the solved editions by nbval; with --soak their points are counted as well")
    notebook = run(EDITIONS[path.parent / "solved" / path.name], tmp_path, monkeypatch)
    assert failed(notebook) == []
    scores = [o.data[card.MIME] for c in notebook.cells for o in c.get("outputs", ()) if card.MIME in o.get("data", {})]
    assert [score["exercise"] for score in scores] == [CHECK.search(source)[1] for source in checks(notebook)]
    assert all(score["score"] == score["possible"] > 0 for score in scores)
