"""Data behind lab 04's pictures and tables: bars of bytes, ZeRO's Table 1, claims, switches, and sharding over nodes.

Numbers of recorded steps come from `recorded` and `engines`, formulas from `labkit.cost`. Left out: drawing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.check.table import table
from labkit.cost import comm, groups, hardware, states
from labkit.cost.claims import saving, verdicts
from labkit.labs.lab04.recorded import Step

if TYPE_CHECKING:
    from labkit.cost.parts import Cluster

__all__ = ["PARTS", "Spread", "bars", "by_formula", "claims_table", "saving", "spreads", "step_table", "switches_table",
           "table_1"]  # fmt: skip
PARTS = ("parameters", "gradients", "optimizer", "buffers")
# ZeRO, arXiv:1910.02054, Table 1: models, degrees of data parallelism.
MODELS, DEGREES = (7.5e9, 128e9, 1e12), (1, 4, 16, 64, 256, 1024)


def bars(steps: Sequence[Step]) -> tuple[list[str], dict[str, list[float]]]:
    """(names, {kind: bytes per parameter}) of model states when backward has ended, and of the largest buckets."""
    found: dict[str, list[float]] = {kind: [] for kind in PARTS}
    for step in steps:
        held = step.states() | {"buffers": step.most("buffers")}
        for kind in PARTS:
            found[kind].append(held[kind] / step.parameters)
    return [step.name for step in steps], found


def by_formula(stage: int, ranks: int, precision: str = "fp32") -> dict[str, float]:
    """Bytes per parameter of a rank's states by ZeRO's own count (section 5), without padding."""
    million = 10**6 * ranks
    held = states.state_bytes(million, states.per_parameter("zero", precision), stage, ranks)
    return {kind: getattr(held, kind) / million for kind in PARTS[:3]}


def step_table(steps: Sequence[Step], ranks: int) -> str:
    """Per step: states by kind in bytes per parameter, and elements sent per parameter, in units of (N-1)/N."""
    rows = []
    for step in steps:
        held = [f"{num_bytes / step.parameters:.2f}" for num_bytes in step.states().values()]
        moved = ", ".join(f"{calls} {op}" for op, (calls, num_bytes) in step.moved.items() if num_bytes > 1000)
        rows.append((step.name, *held, f"{step.sent_elements * ranks / (ranks - 1):.3f}", moved))
    head = ("", "parameters", "gradients", "optimizer", "sent, Ψ(N-1)/N", "calls")
    return table(head, rows)


def table_1() -> str:
    """ZeRO, arXiv:1910.02054, Table 1: GB of model states a device, by degree of data parallelism, model and stage."""
    each = states.per_parameter("zero", "bf16")
    rows = []
    for n in DEGREES:
        held = [states.state_bytes(int(p), each, stage, n).total / 1e9 for p in MODELS for stage in (1, 2, 3)]
        rows.append((str(n), *(f"{gb:.3g}" if gb < 1000 else f"{gb:.0f}" for gb in held)))
    lines = table(("ranks", *("1", "2", "3") * len(MODELS)), rows).splitlines()
    above = ""
    for count, column in zip(MODELS, list(re.finditer("-+", lines[1]))[1::3], strict=True):
        above = f"{above:{column.start()}}{count / 1e9:.4g}B, stage"
    return "\n".join(["GB on each device", "", above, *lines])


def claims_table(ranks: int = 8, device: str = "H100", precision: str = "bf16") -> str:
    """Common claims about the stages with a computed verdict each (`labkit.cost.claims`), as a table in Markdown."""
    rows = [f"| {each.claim} | {each.holds} | {each.why} |" for each in verdicts(ranks, device, precision)]
    return "\n".join(["| claim | verdict | why |", "|---|---|---|", *rows])


def switches_table(steps: Mapping[str, Step], cluster: Cluster) -> str:
    """Per configuration: calls and bytes of gradients, the largest buckets, and what a replay on a cluster exposes.

    Exposed is what no work hides in the order that the record has: a CPU's, where nothing of DeepSpeed overlaps.
    """
    from labkit.record.prices import prices
    from labkit.record.replay import replay

    rows = []
    for name, step in steps.items():
        calls = {op: each for op, each in step.moved.items() if op != "all_gather" and each[1] > 1000}
        moved = "; ".join(f"{count} {op}, {num_bytes / 1e6:.1f} MB" for op, (count, num_bytes) in calls.items())
        exposed_s = replay(step.records, prices(cluster)).exposed_s(0)
        rows.append((name, moved, f"{step.most('buffers') / 1e6:,.1f} MB", f"{exposed_s * 1e3:.2f} ms"))
    return table(("stage 2", "gradients", "buckets hold", f"exposed on {cluster.node.device.name}s"), rows)


@dataclass(frozen=True)
class Spread:
    """One way to share states over nodes. Bytes per parameter: kept by a GPU (parameters, gradients, optimizer, and
    second copies as buffers), and leaving a node in a step.
    """

    name: str
    kept: dict[str, float]
    leaving: float


def spreads(nodes: int = 2, per_node: int = 8) -> list[Spread]:
    """ZeRO, hybrid sharding and ZeRO++ on equal nodes, bf16 with fp32 masters, one microbatch, one network card each.

    Hybrid (HSDP): shards within a node, replicas between (FSDP, arXiv:2304.11277, section 3.2.2): a GPU's part of the
    gradients is all_reduced between nodes. ZeRO++ (arXiv:2306.10209, sections 3.1 to 3.3): weights gathered as 8-bit
    integers (qwZ), a second copy within the node for backward (hpZ), gradients reduced as 4-bit integers in the node
    and then between nodes (qgZ); scales not counted.
    """
    n, each, size = nodes * per_node, states.per_parameter("zero", "bf16"), 2
    group = groups.on_cluster(hardware.cluster("A100-40", nodes, per_node=per_node, nic="100 GbE"))

    def leaving(op: str, num_bytes: float = size) -> float:
        return comm.leaving_bytes(op, num_bytes, group, "ring") if nodes > 1 else 0.0

    def kept(stage: int, shards: int, copies: float = 0.0) -> dict[str, float]:
        held = states.state_bytes(10**6 * n, each, stage, shards)
        return {kind: getattr(held, kind) / (10**6 * n) for kind in PARTS[:3]} | {"buffers": copies}

    once = leaving("all_gather")
    between = comm.sent_bytes("all_reduce", size, nodes)  # per_node GPUs, each with 1 / per_node of it
    return [
        Spread("DDP", kept(0, n), leaving("all_reduce")),
        Spread("ZeRO-2", kept(2, n), 2 * once),
        Spread("ZeRO-3", kept(3, n), 3 * once),
        Spread("HSDP", kept(3, per_node), between),
        Spread("ZeRO++", kept(3, n, size / per_node), once / 2 + comm.sent_bytes("all_to_all", size / 4, nodes)),
    ]
