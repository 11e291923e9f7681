"""The environment half of the doctor: everything it looks at, in order, and the one line of a setup cell.

Left out: the other half, DeepSpeed configurations before they run.
"""

import platform

from labkit import __version__
from labkit.doctor import gpus, machine, software
from labkit.doctor.findings import Report


def examine() -> Report:
    """Look at everything; takes well under a second. In a notebook the report shows as a table."""
    return Report((*software.findings(), *gpus.findings(), *machine.findings()))


def about(world_size: int = machine.RANKS) -> None:
    """Print one line: versions, and the backend and cores that `world_size` ranks will get."""
    print(line(world_size))


def line(world_size: int) -> str:
    """The line that `about` prints."""
    from labkit.ranks.backend import choose_backend

    backend, devices = choose_backend(world_size, None)
    backend = "nccl" if "nccl" in backend else backend
    on_gpus = len({device for device in devices if device != "cpu"})
    number, unit = (on_gpus, "GPU") if on_gpus else (machine.usable_cores(), "core")
    torch = software.version("torch") or "missing"
    versions = f"labkit {__version__}, torch {torch}, Python {platform.python_version()}"
    return f"{versions}: {world_size} ranks over {backend} on {number:g} {unit}{'s' * (number != 1)}"
