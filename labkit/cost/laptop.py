"""This laptop as a cluster: what was measured once with as many busy processes as ranks, kept in a file.

Here are the record, its file (`machine.json` in LABKIT_HOME, by default ~/.labkit; one entry per host, number of cores
and number of ranks) and the cluster it makes. A file that is missing, broken or not to be written is no error: it is
measured again. Left out: the measuring itself, which needs ranks and so stands in a room above.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from labkit.cost.parts import Cluster, Device, Link, Node

VERSION = 1
NAME = "machine.json"


@dataclass(frozen=True)
class Laptop:
    """Figures of one rank while `num_ranks` ranks are busy.

    cores: cores that this process may use. flops: fp32 FLOP/s of a matrix product; memory_bandwidth: bytes read and
    written per second; memory_bytes: of the machine. alpha_s, bandwidth: of a message from rank to rank; call_s: of
    starting a collective; busy_share: the part of a core that a rank's communication keeps busy. measured: when, ISO
    8601. ValueError for figures that nothing can have.
    """

    num_ranks: int
    cores: float
    flops: float
    memory_bandwidth: float
    memory_bytes: int
    alpha_s: float
    bandwidth: float
    call_s: float
    measured: str
    host: str
    busy_share: float = 1.0

    def __post_init__(self):
        positive = ("num_ranks", "cores", "flops", "memory_bandwidth", "memory_bytes", "bandwidth")
        for name in (*positive, "alpha_s", "call_s", "busy_share"):
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            if not good or (value == 0 and name in positive):
                raise ValueError(f"{name} of a laptop cannot be {value!r}")
        if not (isinstance(self.measured, str) and isinstance(self.host, str)):
            raise ValueError("measured and host of a laptop are text")


def cluster_of(laptop: Laptop) -> Cluster:
    """A cluster of one node whose devices are the laptop's ranks."""
    source = f"measured on {laptop.host}, {laptop.num_ranks} ranks busy, {laptop.measured}"
    memory = laptop.memory_bytes // laptop.num_ranks
    device = Device("a rank of this laptop", (("fp32", laptop.flops),), memory, laptop.memory_bandwidth, source=source)
    loopback = Link("loopback", laptop.alpha_s, laptop.bandwidth, laptop.call_s, source)
    return Cluster(
        Node(
            "this laptop",
            device,
            laptop.num_ranks,
            loopback,
            cores=laptop.cores,
            source=source,
            busy_share=laptop.busy_share,
        )
    )


def folder() -> Path:
    """The folder of the learner's own files: LABKIT_HOME, else ~/.labkit."""
    return Path(os.environ.get("LABKIT_HOME") or Path.home() / ".labkit")


def load(num_ranks: int, cores: float, host: str | None = None, path: Path | None = None) -> Laptop | None:
    """What was measured on this host with so many cores and ranks, or None.

    host: by default this machine's name. path: by default `machine.json` in `folder`.
    """
    wanted = _key(num_ranks, cores, platform.node() if host is None else host)
    return _read(folder() / NAME if path is None else path).get(wanted)


def save(laptop: Laptop, path: Path | None = None) -> str:
    """Keep it, beside those of other hosts and numbers of ranks. Returns "" or, never raising, why it is not kept.

    The file is replaced whole, so a reader never sees half of it.
    """
    path = folder() / NAME if path is None else path
    kept = {**_read(path), _key(laptop.num_ranks, laptop.cores, laptop.host): laptop}
    text = json.dumps({"version": VERSION, "laptops": [asdict(kept[key]) for key in sorted(kept)]}, indent=1)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=NAME, delete=False, encoding="utf-8") as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return f"{path} cannot be written ({error.strerror or error}): this laptop will be measured again"
    return ""


def _key(num_ranks: int, cores: float, host: str) -> tuple:
    return host, float(cores), num_ranks


def _read(path: Path) -> dict[tuple, Laptop]:
    """Entries of the file that are whole; {} for a file that is missing, broken, or of another version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["laptops"] if data["version"] == VERSION else ()
        found = [Laptop(**{field.name: entry[field.name] for field in fields(Laptop)}) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {_key(each.num_ranks, each.cores, each.host): each for each in found}
