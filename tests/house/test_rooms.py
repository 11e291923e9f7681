"""The rooms stand on one another and never the other way; what a room must not know, it does not import."""

import ast

import pytest

import labkit
from tests.house import source


@pytest.fixture(scope="module")
def edges():
    found = source.graph(source.python_files("labkit"))
    # All that a room may take from the face is `labkit.__version__`; a test below sees to that.
    return {module: {other for other in others if other != "labkit"} for module, others in found.items()}


def test_every_module_is_in_a_known_room(edges):
    assert {source.room(module) for module in edges if module not in source.OUTSIDE} <= set(source.ROOMS)


def test_no_room_imports_an_upper_room(edges):
    assert source.upward(edges) == []


def test_no_modules_import_each_other_in_a_circle(edges):
    assert source.circle(edges) == []


def test_no_room_imports_the_face(edges):
    takers = []
    for path in source.python_files("labkit"):
        module = source.module_name(path)
        names = source.imported(ast.parse(path.read_text()), module, path.name == "__init__.py")
        names -= {"labkit.check"}  # also the name of a room
        takers += [(module, name) for name in names if name.removeprefix("labkit.") in labkit.__all__]
    assert takers == []


@pytest.mark.parametrize(
    "room, strangers",
    [
        ("cost", {"torch", "matplotlib", "IPython", "ipywidgets"}),
        ("schedule", {"torch", "matplotlib", "IPython", "ipywidgets"}),
        ("doctor", {"torch", "matplotlib"}),
        ("ranks", {"IPython", "matplotlib", "ipywidgets"}),
        ("record", {"IPython", "matplotlib", "ipywidgets"}),
        ("check", {"matplotlib"}),
        ("labs", {"matplotlib", "IPython", "ipywidgets"}),
    ],
)
def test_a_room_does_not_know_strangers(room, strangers):
    found = set()
    for path in source.LABKIT.glob(f"{room}/**/*.py"):
        names = source.imported(ast.parse(path.read_text()), source.module_name(path))
        found |= {(path.name, name) for name in names if name.split(".")[0] in strangers}
    assert found == set()


def test_an_upward_import_is_seen():
    edges = {"labkit.ranks.launch": {"labkit.check.card"}, "labkit.check.card": {"labkit.ranks.launch"}}
    assert source.upward(edges) == [("labkit.ranks.launch", "labkit.check.card")]


def test_a_circle_is_seen():
    assert source.circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert source.circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "line, expected",
    [
        ("import labkit.ranks.launch", "labkit.ranks.launch"),
        ("from labkit.ranks import launch", "labkit.ranks.launch"),
        ("from . import launch", "labkit.ranks.launch"),
        ("from .launch import f", "labkit.ranks.launch"),
        ("from ..check import card", "labkit.check.card"),
        ("def f():\n    import labkit.check.card", "labkit.check.card"),
    ],
)
def test_every_form_of_import_is_seen(line, expected):
    assert expected in source.imported(ast.parse(line), "labkit.ranks.rank")
