"""labkit's own source as data: its files, what they import, and circles in that.

Left out: imports made by name at run time (`importlib.import_module`), which the face and the command use.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LABKIT = ROOT / "labkit"
# Ground floor first: a room imports from itself and from the rooms before it.
ROOMS = (
    "cost", "schedule", "ranks", "record", "model", "check", "labs", "view", "doctor", "classroom", "cli",
)  # fmt: skip
OUTSIDE = ("labkit", "labkit.bootstrap", "labkit.__main__")  # the face, and what runs before labkit is there


def module_name(path, root=ROOT):
    """The dotted name of a file: "labkit.ranks.launch"; a package's __init__ is the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*folders):
    """Every .py file of ours under the given folders of the repository, sorted."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "node_modules" not in path.parts)


def imported(tree, module, is_package=False):
    """Dotted names that imports anywhere in a file may mean: `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return found


def graph(files, root=ROOT):
    """{module: modules of the same files that it imports}."""
    names = {module_name(path, root): path for path in files}
    edges = {}
    for name, path in names.items():
        found = imported(ast.parse(path.read_text()), name, path.name == "__init__.py")
        edges[name] = {other for other in found if other in names and other != name}
    return edges


def room(module):
    """The room of a module of labkit: "ranks" for "labkit.ranks.launch"; "" for the face."""
    return module.split(".")[1] if "." in module else ""


def upward(edges):
    """Pairs (module, imported module) where a room reaches for one above it, or for the face."""
    wrong = []
    for module, others in edges.items():
        if module not in OUTSIDE:
            mine = ROOMS.index(room(module))
            above = {o for o in others if o in OUTSIDE or ROOMS.index(room(o)) > mine}
            wrong += [(module, other) for other in above]
    return sorted(wrong)


def circle(edges):
    """Modules that import each other in a circle, the first repeated at the end; [] for none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for other in sorted(edges.get(module, ())):
            if found := visit(other):
                return found
        path.pop()
        done.add(module)
        return []

    for module in sorted(edges):
        if found := visit(module):
            return found
    return []
