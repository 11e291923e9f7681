"""Findings about what is installed: the system, Python, torch, DeepSpeed, Jupyter.

Versions come from package metadata and from files, without importing what they belong to: torch alone takes
seconds. Left out: whether a package works; the first launch tells.
"""

import importlib.metadata
import json
import platform
import shutil
import sys
from pathlib import Path

from labkit.doctor import parse
from labkit.doctor.findings import Finding

TORCH_FLOOR = (2, 11)


def findings() -> list[Finding]:
    """Everything that is installed, but what GPUs need."""
    return [system(), python(), torch(), deepspeed(), jupyter()]


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def system() -> Finding:
    """Linux has everything; macOS lacks two safeguards; Windows has no fork."""
    value = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "win32":
        return Finding("system", "problem", value, "ranks need Unix processes: open the lab inside WSL 2")
    if sys.platform != "linux":
        meaning = "labs run; bytes on sockets, the strongest evidence, can be read on Linux only"
        return Finding("system", "note", value, meaning)
    return Finding("system", "ok", value)


def python() -> Finding:
    """Python 3.10-3.13."""
    value = platform.python_version()
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding("Python", "problem", value, "labkit is made for Python 3.10-3.13: take one of those")
    return Finding("Python", "ok", value)


def torch() -> Finding:
    """torch 2.11 or newer; the labs are held to 2.13."""
    value = version("torch")
    if value is None:
        return Finding("torch", "problem", "not installed", "no lab runs without it: pip install torch")
    if parse.version_tuple(value)[:2] < TORCH_FLOOR:
        return Finding("torch", "problem", value, "the labs need torch 2.11 or newer: pip install -U torch")
    return Finding("torch", "ok", value)


def deepspeed() -> Finding:
    """DeepSpeed, and the compiler that some of its optimizers want."""
    value = version("deepspeed")
    if value is None:
        meaning = "its half of each lab's closing comparison is skipped: pip install deepspeed"
        return Finding("DeepSpeed", "note", "not installed", meaning)
    missing = [tool for tool in ("ninja", "g++") if shutil.which(tool) is None and version(tool) is None]
    if missing:
        meaning = f"no {' and no '.join(missing)}: its own Adams cannot be compiled; the labs use torch's"
        return Finding("DeepSpeed", "note", value, meaning)
    return Finding("DeepSpeed", "ok", value)


def jupyter() -> Finding:
    """IPython, ipykernel and ipywidgets; and whether the kernel that runs this can be listened to."""
    packages = ("IPython", "ipykernel", "ipywidgets")
    value = ", ".join(f"{package} {version(package) or 'missing'}" for package in packages)
    if version("ipywidgets") is None:
        return Finding("Jupyter", "note", value, "explorers show one state only: pip install ipywidgets")
    if kernel_transport() == "tcp":
        meaning = (
            "this kernel talks over TCP on loopback, where others on a shared machine can listen; "
            "`make lab` uses sockets of your own"
        )
        return Finding("Jupyter", "note", value, meaning)
    return Finding("Jupyter", "ok", value)


def kernel_transport() -> str | None:
    """ "ipc" or "tcp": how the kernel that runs this talks to its clients; None outside a kernel."""
    if "ipykernel" not in sys.modules:
        return None
    from ipykernel.connect import get_connection_file

    try:
        return json.loads(Path(get_connection_file()).read_text()).get("transport", "tcp")
    except (OSError, RuntimeError, ValueError):
        return None
