"""Bytes that leave a node: from what ranks recorded, by rank, with ranks numbered node by node.

A message leaves if its two ends are on different nodes. A collective is taken at its stated algorithm
(`labkit.cost.traffic`): ring and chain send to the next rank of the group, gather and scatter go straight
to and from the root, all_to_all to everyone. Left out: what gloo itself puts on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.check.evidence import Observed


@dataclass(frozen=True)
class Crossing:
    """What one call by one rank sends: bytes across to other nodes, and within its own. whole: its group is all."""

    rank: int
    op: str
    across_bytes: float
    within_bytes: float
    whole: bool


def crossings(observed: Observed, ranks_per_node: int) -> list[Crossing]:
    """Every sending call of every rank, in order."""
    found = []
    for rank, record in enumerate(observed.records):
        for event in record.communications if record is not None else ():
            if event.op == "recv":
                continue
            across = event.sent_bytes * _share_across(event, rank, ranks_per_node)
            whole = event.op != "send" and len(event.ranks) == observed.world_size
            found.append(Crossing(rank, event.op, across, event.sent_bytes - across, whole))
    return found


def by_node(found: list[Crossing], world_size: int, ranks_per_node: int) -> list[float]:
    """Bytes that leave each node."""
    leaving = by_rank(found, world_size)
    return [sum(leaving[first : first + ranks_per_node]) for first in range(0, world_size, ranks_per_node)]


def by_rank(found: list[Crossing], world_size: int) -> list[float]:
    """Bytes that each rank sends to other nodes."""
    return [sum(each.across_bytes for each in found if each.rank == rank) for rank in range(world_size)]


def _share_across(event: Any, rank: int, ranks_per_node: int) -> float:
    """Share of what this call sends that goes to another node."""
    node = rank // ranks_per_node
    if event.op == "send":
        return float(event.peer // ranks_per_node != node)
    others = [other for other in event.ranks if other != rank]
    if not others or event.op == "barrier":
        return 0.0
    if event.op == "gather":
        return float(event.root // ranks_per_node != node)
    if event.op in ("scatter", "all_to_all"):
        return sum(other // ranks_per_node != node for other in others) / len(others)
    following = event.ranks[(event.ranks.index(rank) + 1) % len(event.ranks)]
    return float(following // ranks_per_node != node)
