"""Small is a feature: files of 350 lines (tests: 500), functions of 40, a docstring first, nothing done at import."""

import ast
import re

import pytest

from tests.house import source

FILES = source.python_files("labkit", "slides", "tests")
LONGEST_FILE, LONGEST_TEST_FILE, LONGEST_FUNCTION = 350, 500, 40
# Calls that make a constant, as do methods of a string that is written out, and functions of paths. A name in
# CapWords makes a record or a type, which is as harmless.
CONSTANT_MAKERS = {"re.compile", "frozenset", "range", "tuple", "dict", "float", "object", "field", "type"}
CONSTANT_MAKERS |= {"struct.calcsize", "sysconfig.get_path", "sysconfig.get_paths"}


def name(path):
    return str(path.relative_to(source.ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_is_small_and_opens_with_a_docstring(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text, "say in a few lines what is here and what was left out"
    assert len(text.splitlines()) <= (LONGEST_TEST_FILE if name(path).startswith("tests/") else LONGEST_FILE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions_are_small(path):
    functions = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
    assert [f.name for f in functions if f.end_lineno - f.lineno >= LONGEST_FUNCTION] == []


@pytest.mark.parametrize("path", source.python_files("labkit"), ids=name)
def test_records_are_frozen_dataclasses_not_named_tuples(path):
    # A NamedTuple never equals its twin, so that every check would say "patched".
    assert not re.search(r"\b(NamedTuple|namedtuple)\b", path.read_text())


@pytest.mark.parametrize("path", source.python_files("labkit", "slides"), ids=name)
def test_nothing_is_done_at_import(path):
    assert done_at_import(ast.parse(path.read_text())) == []


def done_at_import(tree):
    """Lines of a module that do something when it is imported, other than define and import."""
    return sorted({node.lineno for statement in tree.body for node in acts(statement)})


def acts(statement):
    """Nodes of a module-level statement that act."""
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if isinstance(statement, ast.ClassDef):
        for inner in statement.body:
            yield from acts(inner)
    elif isinstance(statement, ast.If):
        if "__main__" not in ast.unparse(statement.test):
            for inner in [*statement.body, *statement.orelse]:
                yield from acts(inner)
    elif isinstance(statement, ast.Try):  # a package that may be missing
        for inner in [*statement.body, *statement.orelse, *(s for h in statement.handlers for s in h.body)]:
            yield from acts(inner)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
        if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
            yield statement
        yield from (n for n in ast.walk(statement) if isinstance(n, ast.Call) and not makes_constant(n))
    elif not isinstance(statement, ast.Pass):
        yield statement


def makes_constant(call):
    called = ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
        return True
    if called.startswith("os.path.") or "__file__" in called:
        return True
    if re.fullmatch(r"_?[A-Z][A-Z0-9_]*\.format", called):
        return True
    return called in CONSTANT_MAKERS or called.split(".")[-1].lstrip("_")[:1].isupper()


@pytest.mark.parametrize(
    "text, lines",
    [
        ("A = open('x')", [1]),
        ("def f():\n    open('x')\nf()", [3]),
        ("for i in range(3):\n    pass", [1]),
        ("class A:\n    b = load()", [2]),
        ("A = (1, 'x', {2: 3})\nB = frozenset(A)\nif __name__ == '__main__':\n    main()", []),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", []),
    ],
)
def test_what_acts_at_import_is_seen(text, lines):
    assert done_at_import(ast.parse(text)) == lines
