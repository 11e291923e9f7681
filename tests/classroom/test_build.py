"""Building editions:

stubs and solutions, stable bytes, stamped addresses, and edits by hand that are caught.
"""

import json
import shutil

import nbformat
import pytest

from labkit.check import stubs
from labkit.classroom import build

SOURCE = '''\
# %% [markdown]
# # 07 Pipe & Line
# *A question?* Forty minutes.

# %%
import math

# %% [markdown]
# **Exercise 7.1: halve.** Rule and shapes.

# %% exercise="7.1"
def halve(x):
    """Half of x."""
    # SOLUTION
    if x:
        return x / 2
    return 0
    # END SOLUTION


# %%
check("7.1")

# %% tags=["raises-exception"]
raise ValueError("on purpose")
'''
PROJECT = '[tool.other]\nrepository = "https://example.org/wrong"\n\n[tool.labkit]\n# here\nrepository = "https://github.com/some-one/some.lab"\n'


@pytest.fixture
def root(tmp_path):
    (tmp_path / "notebooks" / "source").mkdir(parents=True)
    (tmp_path / "notebooks" / "source" / "lab07.py").write_text(SOURCE)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return tmp_path


def cells(root, name="notebooks/07_pipe_line.ipynb"):
    return json.loads((root / name).read_text())["cells"]


def source_of(root, cell_id, name="notebooks/07_pipe_line.ipynb"):
    return next("".join(cell["source"]) for cell in cells(root, name) if cell["id"] == cell_id)


def test_the_learner_edition_has_a_stub_and_the_solved_one_the_solution(root):
    assert build.main(root=root) == 0
    stub = source_of(root, "exercise-7-1")
    assert stub == 'def halve(x):\n    """Half of x."""\n    return NotImplemented  # your code here'
    full = source_of(root, "exercise-7-1", "notebooks/solved/07_pipe_line.ipynb")
    assert full == 'def halve(x):\n    """Half of x."""\n    if x:\n        return x / 2\n    return 0'
    names = {}
    exec(stub, names)
    assert names["halve"](4) is NotImplemented
    exec(full, names)
    assert names["halve"](4) == 2


def test_editions_differ_in_their_exercises_and_badge_only(root):
    build.main(root=root)
    pairs = zip(cells(root), cells(root, "notebooks/solved/07_pipe_line.ipynb"), strict=True)
    assert [a["id"] for a, b in pairs if a != b] == ["cell-00", "exercise-7-1"]


def test_editions_are_valid_notebooks_without_outputs_or_metadata(root):
    build.main(root=root)
    for path in (root / "notebooks").rglob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3" and "jupytext" not in notebook.metadata
        for cell in notebook.cells:
            assert set(cell.metadata) <= {"tags"}
            assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)
    assert cells(root)[-1]["metadata"] == {"tags": ["raises-exception"]}


def test_badge_and_setup_cell_are_stamped_from_the_one_address(root):
    build.main(root=root)
    title, setup = cells(root)[:2]
    assert "".join(title["source"]).startswith("# 07 Pipe & Line\n\n[![Open in Colab](")
    assert "/github/some-one/some.lab/blob/main/notebooks/07_pipe_line.ipynb)" in "".join(title["source"])
    assert "git+https://github.com/some-one/some.lab" in "".join(setup["source"])
    assert len(setup["source"]) <= 8
    compile("".join(setup["source"]), "setup", "exec")


def test_building_twice_gives_identical_bytes_and_writes_nothing(root, capsys):
    build.main(root=root)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*.ipynb")}
    assert len(before) == 2 and capsys.readouterr().out.count("built") == 2
    assert build.main(root=root) == 0 and build.main(check=True, root=root) == 0
    assert capsys.readouterr().out == ""
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in root.rglob("*.ipynb")} == before
    elsewhere = root / "elsewhere"
    shutil.copytree(root / "notebooks" / "source", elsewhere / "notebooks" / "source")
    shutil.copy(root / "pyproject.toml", elsewhere)
    build.main(root=elsewhere)
    for path, (content, _) in before.items():
        assert (elsewhere / path.relative_to(root)).read_bytes() == content


def test_an_edition_edited_by_hand_is_named(root, capsys):
    build.main(root=root)
    path = root / "notebooks" / "solved" / "07_pipe_line.ipynb"
    path.write_text(path.read_text().replace("x / 2", "x / 3"))
    capsys.readouterr()
    assert build.main(check=True, root=root) == 1
    out = capsys.readouterr().out
    assert "notebooks/solved/07_pipe_line.ipynb" in out and "by hand" in out and out.count("\n") == 1
    path.unlink()
    assert build.main(check=True, root=root) == 1 and "is missing" in capsys.readouterr().out
    assert not path.exists()


def test_missing_leaves_what_a_learner_has(root):
    build.main(root=root)
    path = root / "notebooks" / "07_pipe_line.ipynb"
    path.write_text("mine")
    (root / "notebooks" / "solved" / "07_pipe_line.ipynb").unlink()
    assert build.main(missing=True, root=root) == 0
    assert path.read_text() == "mine" and (root / "notebooks" / "solved" / "07_pipe_line.ipynb").exists()


def test_an_edition_that_was_run_is_put_aside_and_not_lost(root, capsys):
    build.main(root=root)
    path = root / "notebooks" / "07_pipe_line.ipynb"
    for _ in range(2):
        notebook = json.loads(path.read_text())
        notebook["cells"][2]["execution_count"] = 1
        path.write_text(json.dumps(notebook))
        build.main(root=root)
    kept = sorted(p.name for p in (root / "notebooks").glob("*.ipynb"))
    assert kept == ["07_pipe_line.ipynb", "07_pipe_line.mine-1.ipynb", "07_pipe_line.mine-2.ipynb"]
    assert "kept as 07_pipe_line.mine-1.ipynb" in capsys.readouterr().out
    assert build.main(check=True, root=root) == 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("    # END SOLUTION\n", "", "needs one # SOLUTION"),
        ("    # SOLUTION\n", "", "needs one # SOLUTION"),
        ("    if x:\n", "    # END SOLUTION\n    # SOLUTION\n    if x:\n", "needs one # SOLUTION"),
        (' exercise="7.1"', "", "outside an exercise's cell"),
        ("# # 07 Pipe", "# # 08 Pipe", "title"),
        ("# # 07", "# 07", "title"),
        ('check("7.1")', 'pass\n# %% exercise="7.1"\n# SOLUTION\n# END SOLUTION', "same exercise"),
    ],
)
def test_a_source_with_a_mistake_is_one_clear_error(root, old, new, told):
    path = root / "notebooks" / "source" / "lab07.py"
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    with pytest.raises(ValueError, match=told):
        build.main(root=root)


def test_a_missing_address_or_source_is_one_clear_error(root, tmp_path):
    (root / "pyproject.toml").write_text("[tool.labkit]\n[other]\nrepository = 'x'\n")
    with pytest.raises(ValueError, match="no repository"):
        build.main(root=root)
    (root / "notebooks" / "source" / "lab07.py").unlink()
    with pytest.raises(ValueError, match="no labNN.py"):
        build.main(root=root)
    with pytest.raises(ValueError, match="not inside a clone"):
        build.find_root(tmp_path.parent)


def test_the_root_is_found_from_any_folder_inside(root):
    inside = root / "notebooks" / "source"
    assert build.find_root(inside) == build.find_root(root) == root.resolve()


CLASS = '''
class Halver(Base):
    """Halves."""

    def __init__(self, times, show=True):
        """Keeps how often."""
        super().__init__()
        # SOLUTION
        self.times = times
        # END SOLUTION

    def halve(self, x):
        # SOLUTION
        for _ in range(self.times):
            x = x / 2
        return x
        # END SOLUTION

    @staticmethod
    def twice(x):
        """Twice x."""
        # SOLUTION
        return 2 * x
        # END SOLUTION


class Second:
    def __init__(self):
        # SOLUTION
        self.x = 1
        # END SOLUTION
'''


def classes(text):
    names = {"Base": object}
    exec(text, names)
    return names["Halver"], names["Second"]


def test_a_class_has_a_stub_in_each_method_and_is_known_for_one():
    text = build.stubbed(CLASS)
    halver, second = classes(text)
    assert stubs.is_stub(halver) and stubs.is_stub(second)
    assert stubs.stub_methods(halver) == ["__init__", "halve", "twice"]
    assert '        raise NotImplementedError("Halver is still a stub")  # your code here\n' in text
    assert '        raise NotImplementedError("Second is still a stub")  # your code here' in text
    assert halver.twice(1) is NotImplemented and halver.halve(None, 1) is NotImplemented
    with pytest.raises(NotImplementedError, match="Halver is still a stub"):
        halver(2)


def test_the_solved_edition_has_the_whole_class():
    halver, second = classes(build.solved(CLASS))
    assert halver(2).halve(8) == 2 and halver.twice(3) == 6 and second().x == 1
    assert stubs.stub_methods(halver) == [] and not stubs.is_stub(halver)


def test_a_method_without_a_stub_is_refused_for_its_class_would_never_be_untouched(root):
    path = root / "notebooks" / "source" / "lab07.py"
    cell = '# %% exercise="7.1"\n'
    path.write_text(SOURCE[: SOURCE.index(cell)] + cell + CLASS.replace("Base", "object") + "\n# %%\n1\n")
    assert build.main(root=root) == 0
    marked = "        # SOLUTION\n        return 2 * x\n        # END SOLUTION\n"
    given = CLASS.replace(marked, "        return 2 * x\n")
    path.write_text(SOURCE[: SOURCE.index(cell)] + cell + given + "\n# %%\n1\n")
    with pytest.raises(ValueError, match="exercise 7.1: twice needs a # SOLUTION"):
        build.main(root=root)
