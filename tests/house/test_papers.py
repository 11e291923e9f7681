"""README and CONTRIBUTING are true: the tree is the tree, links lead somewhere, tables name what the code has."""

import ast
import re
import shutil
import subprocess

import pytest

from labkit import cli
from labkit.check import progress
from labkit.classroom.build import repository_of
from tests.house.source import LABKIT, ROOMS, ROOT

PAPERS = ("README.md", "CONTRIBUTING.md")


def text_of(paper):
    return (ROOT / paper).read_text()


def tree():
    """Paths of README's annotated tree, each with what is said of it."""
    block = re.search(r"^## What is where\n\n```\n(.*?)^```", text_of("README.md"), re.DOTALL | re.MULTILINE)[1]
    found, parent = {}, ""
    for line in block.splitlines():
        name, words = line.split(maxsplit=1)
        parent = name if line[0] != " " else parent
        found[name if line[0] != " " else parent + name] = words
    return found


def test_every_path_of_the_tree_is_there():
    for path, words in tree().items():
        assert (ROOT / path).is_dir() == path.endswith("/") and (ROOT / path).exists(), path
        assert words


def at_the_top():
    """What stands in the repository's root: what git tracks; without git, what is there."""
    git = ["git", "-C", ROOT, "ls-files"]
    tracked = subprocess.run(git, capture_output=True, text=True).stdout if shutil.which("git") else ""
    names = {line.split("/")[0] for line in tracked.splitlines()} or {path.name for path in ROOT.iterdir()}
    return {name for name in names if name[0] != "." and not name.endswith(".egg-info")} - {"build", "dist"}


def test_the_tree_names_everything_at_the_top():
    assert at_the_top() == {path.split("/")[0] for path in tree() if path[0] != "."}


def test_the_tree_names_every_room_in_order():
    named = [path.removeprefix("labkit/").rstrip("/") for path in tree() if path.startswith("labkit/")]
    rooms = [name.removesuffix(".py") for name in named if name not in ("", "bootstrap.py")]
    assert rooms == [room for room in ROOMS if (LABKIT / room).is_dir() or (LABKIT / f"{room}.py").exists()]


@pytest.mark.parametrize("paper", PAPERS)
def test_links_within_the_repository_lead_somewhere(paper):
    links = re.findall(r"\]\(([^):]+)\)", text_of(paper))
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("paper", PAPERS)
def test_addresses_of_the_repository_are_the_one_in_pyproject(paper):
    address = repository_of(ROOT)
    place = address.removeprefix("https://github.com/")
    found = re.findall(r"(?<=github\.com/)[\w-]+/[\w.-]+|(?<=/github/)[\w-]+/[\w.-]+", text_of(paper))
    assert [other for other in found if other != place] == []


def test_every_command_is_in_the_readme_and_no_other():
    named = set(re.findall(r"^\| `labkit (\w+)", text_of("README.md"), re.MULTILINE))
    parser = cli._parser()
    commands = next(action.choices for action in parser._actions if action.choices)
    assert named == set(commands)


def test_options_and_experiments_in_the_papers_exist():
    words = " ".join(map(text_of, PAPERS))
    experiments = {name for name, _ in cli.listing()}
    assert set(re.findall(r"\blab\d\d\.[a-z]\w*(?!\.?\w*\.py)\b", words)) - {"lab00.py"} <= experiments


def test_the_goals_in_the_readme_are_those_of_the_makefile():
    goals = set(re.search(r"^\.PHONY: (.*)", text_of("Makefile"), re.MULTILINE)[1].split())
    named = {word for word in re.split(r"[,:]\s*", tree()["Makefile"]) if word in goals}
    assert named == goals - {"setup", "python"}


def causes_in_the_code():
    """Codes of every Cause and Finding that the room `ranks` makes."""
    codes = set()
    for path in (LABKIT / "ranks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("Cause", "Finding"):
                code = node.args[0]
                codes |= {code.value} if isinstance(code, ast.Constant) else set()
    return codes


def test_the_table_of_causes_is_the_codes():
    table = text_of("CONTRIBUTING.md").split("| code | what happened |")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == causes_in_the_code()


def test_the_progress_format_is_the_stored_one(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    progress.tried("0.2", "def broadcast(): ...", 3)
    data, _ = progress.load()
    table = text_of("CONTRIBUTING.md").split("**Progress**")[1].split("**Check ids**")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert (tmp_path / "progress.json").exists()
    assert set(data) | set(data["exercises"]["0.2"]) | set(data["exercises"]["0.2"]["answer"]) <= named
