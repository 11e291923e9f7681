"""Writes requirements.lock afresh: `python -m tests.house.relock PYTHON ...`, one interpreter a version.

Each interpreter's own pip resolves what pyproject.toml asks for, installing nothing; what the answers share
becomes one pin, and what differs gets a marker. torch and DeepSpeed keep the pins below and are not resolved
(a large wheel, a build from source): what they require is read from where this Python has them installed.
Left out: hashes, since torch's wheel differs from index to index.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

PINNED = {"torch": "2.13.0", "deepspeed": "0.19.8"}
HEADER = """\
# Exact versions of everything that `make lab` and `make test` install, Python 3.10-3.13.
# torch goes in first and alone (DeepSpeed's build wants it there), then the rest without build isolation.
# Written by tests/house/relock.py from pyproject.toml; tests/house/test_packaging.py holds the two together.
"""
ROOT = Path(__file__).resolve().parents[2]


def name_of(requirement):
    """The normalised project name of a requirement, e.g. "ipython-pygments-lexers"."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def requirements_of(package):
    """What an installed package requires, extras and all; nothing for one that is not installed."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def wanted():
    """What pip is asked to resolve: pyproject's requirements and extras, and what the pinned two require."""
    import tomllib  # the one thing here that wants Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)]
    for pinned in PINNED:
        asked += [r for r in requirements_of(pinned) if "extra ==" not in r]
    return [r for r in asked if name_of(r) not in PINNED and not re.match(r"nvidia|cuda|triton", r)]


def resolve(python):
    """(version such as "3.10", {name: version}) as `python`'s pip resolves it, for that interpreter."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output([python, "-c", code], text=True)
    version = version.strip()
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    # For the first release of that version, which some systems still have near enough (Debian 12: 3.11.2); pip
    # wants a target and wheels alone when asked for another Python than its own.
    command += ["--python-version", f"{version}.0", "--only-binary", ":all:", "--target", "unused"]
    report = json.loads(subprocess.check_output([*command, *wanted()]))
    found = (entry["metadata"] for entry in report["install"])
    return version, {name_of(m["name"]): m["version"] for m in found}


def merge(resolved):
    """Lines of the lock from {Python version: {name: version}}: a marker only where the Pythons differ."""
    lines = [f"{name}=={version}" for name, version in PINNED.items()]
    pythons = sorted(resolved, key=lambda version: int(version.split(".")[1]))
    for name in {name for pins in resolved.values() for name in pins}:
        versions = {python: resolved[python].get(name) for python in pythons}
        for version in {v for v in versions.values() if v}:
            where = [python for python in pythons if versions[python] == version]
            lines.append(f"{name}=={version}{marker(where, pythons)}")
    return sorted(lines)


def marker(where, pythons):
    """The environment marker for the Pythons `where` out of all `pythons`; "" for all of them."""
    if where == pythons:
        return ""
    if where == pythons[-len(where) :]:
        return f' ; python_version >= "{where[0]}"'
    if where == pythons[: len(where)]:
        return f' ; python_version < "{pythons[len(where)]}"'
    return " ; " + " or ".join(f'python_version == "{python}"' for python in where)


if __name__ == "__main__":
    lock = HEADER + "\n".join(merge(dict(resolve(python) for python in sys.argv[1:]))) + "\n"
    (ROOT / "requirements.lock").write_text(lock)
