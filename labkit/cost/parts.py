"""What a cluster is described by: links, devices, nodes of devices, clusters of nodes. Frozen records, no data.

Units: seconds, bytes, bytes per second *in one direction*, FLOP/s *dense*. Every record carries its source. Left
out: topology within a node (a node is a switch that serves all its devices at once) and between nodes (a network
that never blocks).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A wire: a message of S bytes takes alpha_s + S / bandwidth, and a call of a collective call_s besides.

    bandwidth: bytes per second in one direction, both directions at once; inf for a free link.
    call_s: the start of a collective, whatever its number of messages (launching a kernel, for instance).
    """

    name: str
    alpha_s: float
    bandwidth: float
    call_s: float = 0.0
    source: str = ""

    def __post_init__(self):
        if not (self.alpha_s >= 0 and self.call_s >= 0 and self.bandwidth > 0):
            raise ValueError(f"link {self.name!r}: alpha_s and call_s must be 0 or more, bandwidth more than 0")


@dataclass(frozen=True)
class Device:
    """A processor with memory. peaks: (dtype, dense FLOP/s) pairs, fp32 being that of ordinary fp32 arithmetic.

    memory_bytes: the datasheet's figure in GiB, which is what vendors mean by their GB; ECC and the driver keep some
    of it. host: its link to the processor's memory, None where it is the processor. nvlink: its link to other devices,
    None without.
    """

    name: str
    peaks: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth: float
    host: Link | None = None
    nvlink: Link | None = None
    source: str = ""

    def __post_init__(self):
        if not (self.peaks and all(flops > 0 for _, flops in self.peaks) and self.memory_bandwidth > 0):
            raise ValueError(f"device {self.name!r}: peaks and memory_bandwidth must be more than 0")

    def peak(self, dtype: str = "fp32") -> float:
        """Dense FLOP/s; dtype as fp32, tf32, fp16, bf16, fp8 or as torch spells it. ValueError if there is none."""
        wanted = spelled(dtype)
        for name, flops in self.peaks:
            if name == wanted:
                return flops
        known = ", ".join(name for name, _ in self.peaks)
        raise ValueError(f"{self.name} has no arithmetic in {dtype}; it has {known}")

    def time_s(self, flops: float, num_bytes: float, dtype: str = "fp32") -> float:
        """Time of an operation: it is bound by arithmetic or by memory (roofline; Williams et al. 2009)."""
        return max(flops / self.peak(dtype), num_bytes / self.memory_bandwidth)


@dataclass(frozen=True)
class Node:
    """`count` equal devices. intra: the link of each to the others. nic: one network card; num_nics of them.

    cores: where the devices are ranks that share a processor's cores, the number of cores; else 0. busy_share: how
    much of a core one rank's communication keeps busy there, from 0 up; more than 1 where several threads work on it.
    """

    name: str
    device: Device
    count: int
    intra: Link
    nic: Link | None = None
    num_nics: int = 0
    cores: float = 0
    source: str = ""
    busy_share: float = 1.0

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"node {self.name!r}: count must be 1 or more, not {self.count}")
        if (self.nic is None) != (self.num_nics < 1):
            raise ValueError(f"node {self.name!r}: give both nic and num_nics, or neither")
        if not (0 <= self.cores < inf and 0 <= self.busy_share < inf):
            raise ValueError(
                f"node {self.name!r}: cores and busy_share must be 0 or more, not {self.cores} and {self.busy_share}"
            )

    def stretch(self, busy: float) -> float:
        """How many times longer computing takes when `busy` cores' worth of work is on the node at once.

        1 on devices of their own. Figures of shared cores are taken with all `count` ranks busy, so it is 1 then
        and less than 1 when some of them wait.
        """
        if not self.cores:
            return 1.0
        return max(1.0, busy / self.cores) / max(1.0, self.count / self.cores)


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` equal nodes. Ranks are numbered node by node."""

    node: Node
    num_nodes: int = 1

    def __post_init__(self):
        if self.num_nodes < 1:
            raise ValueError(f"a cluster has 1 node or more, not {self.num_nodes}")
        if self.num_nodes > 1 and self.node.nic is None:
            raise ValueError(f"{self.node.name} has no network card: several need nic=")

    @property
    def name(self) -> str:
        return self.node.name if self.num_nodes == 1 else f"{self.num_nodes} x {self.node.name}"

    @property
    def size(self) -> int:
        return self.node.count * self.num_nodes

    def node_of(self, rank: int) -> int:
        """The node that a rank is on. ValueError for a rank that the cluster has not."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.name} has ranks 0 to {self.size - 1}, not {rank}")
        return rank // self.node.count


def spelled(dtype: object) -> str:
    """A dtype in datasheets' spelling: torch.bfloat16, "bfloat16" and "bf16" are all bf16."""
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "fp8"
    return {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(name, name)


def named(kind: str, name: object, known: Iterable) -> object:
    """The record of that name; capitals, blanks and dashes do not matter. ValueError lists what would do."""
    known = tuple(known)
    for record in known:
        if plain(record.name) == plain(name):
            return record
    raise ValueError(f"no {kind} is called {name!r}; known: {', '.join(record.name for record in known)}")


def plain(name: object) -> str:
    """A name as it is compared."""
    return "".join(letter for letter in str(name).casefold() if letter.isalnum())
