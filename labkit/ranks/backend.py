"""Which backend ranks use and on which devices, decided in the notebook without importing torch.

Left out: asking CUDA itself. That would make a context in the notebook, and a forked rank could not have its own.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from pathlib import Path

from labkit.ranks.outcome import LaunchError


def choose_backend(world_size: int, wanted: str | None) -> tuple[str, list[str]]:
    """The backend and each rank's device name.

    nccl when there is a GPU for every rank (it refuses to share one); else gloo, on the GPUs there are or the
    CPU. Raises LaunchError for an unknown backend, and when nccl is asked for with too few GPUs.
    """
    gpus = gpu_count()
    if wanted not in (None, "gloo", "nccl"):
        raise LaunchError(f"backend is {wanted!r}; it can be 'gloo' or 'nccl'")
    if wanted == "nccl" and gpus < world_size:
        raise LaunchError(f"nccl needs a GPU for every rank; there are {gpus} for {world_size}: use gloo")
    devices = [f"cuda:{rank % gpus}" if gpus else "cpu" for rank in range(world_size)]
    if wanted == "gloo" or gpus < world_size:
        return "gloo", devices
    return "cpu:gloo,cuda:nccl", devices


def gpu_count() -> int:
    """GPUs that ranks may use: none when the installed torch is a CPU build."""
    found = len(glob.glob("/dev/nvidia[0-9]*"))
    if not found or torch_cuda() is None:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def torch_cuda() -> str | None:
    """The CUDA version of the installed torch, e.g. "12.8"; None for a CPU build, and where there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    return cuda_named_in((Path(spec.origin).parent / "version.py").read_text())


def cuda_named_in(version_py: str) -> str | None:
    """The CUDA version in the text of torch/version.py; None for a CPU build."""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", version_py, re.MULTILINE)
    return found[1] if found else None
