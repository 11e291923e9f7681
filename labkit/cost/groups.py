"""A group of ranks and the wires between them, which is all that a collective's cost depends on.

`on_link`: every rank reaches every other over one kind of link, as in textbooks. `on_cluster`: ranks inside a node
talk over its inner link, ranks of different nodes over network cards. Left out: which ranks are neighbours within a
node; all are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.cost.parts import Cluster, Link


@dataclass(frozen=True)
class Group:
    """counts: ranks of the group on each node that it touches. intra: the link between ranks of a node.

    inter: one network card of a node; num_nics: how many of them the group has to itself in every node, on average.
    """

    counts: tuple[int, ...]
    intra: Link
    inter: Link | None = None
    num_nics: float = 1.0

    @property
    def size(self) -> int:
        return sum(self.counts)

    @property
    def num_nodes(self) -> int:
        return len(self.counts)

    @property
    def per_node(self) -> int:
        """Ranks on the fullest node."""
        return max(self.counts)

    @property
    def even(self) -> bool:
        """Whether every node holds equally many."""
        return len(set(self.counts)) == 1


def on_link(n: int, link: Link) -> Group:
    """n ranks, each in a node of its own, over one kind of link. ValueError for n below 1."""
    if not (isinstance(n, int) and n >= 1):
        raise ValueError(f"a group has 1 rank or more, not {n!r}")
    return Group((1,) * n, link, link)


def on_cluster(cluster: Cluster, ranks: Iterable[int] | None = None, nic_share: float = 1.0) -> Group:
    """A group of ranks (by default all) on a cluster.

    A node's cards are shared out evenly among its devices, so a group has as many as belong to its own ranks there,
    and at least one. nic_share: the part of them that it gets while other groups use them too (see `nic_share`).
    ValueError for ranks that the cluster has not, or that are named twice.
    """
    if not 0 < nic_share <= 1:
        raise ValueError(f"nic_share is more than 0 and at most 1, not {nic_share!r}")
    node = cluster.node
    counts = _counts(cluster, range(cluster.size) if ranks is None else ranks)
    cards = max(1.0, max(counts) * node.num_nics / node.count) * nic_share
    return Group(counts, node.intra, node.nic, cards)


def nic_share(cluster: Cluster, groups: Sequence[Iterable[int]]) -> float:
    """The part of its cards that each group gets when all these groups cross nodes at the same time.

    1 where every group has cards of its own; 1/8 where eight groups, one per device, share a node's only card.
    """
    asked: Counter[int] = Counter()
    for ranks in groups:
        ranks = tuple(ranks)
        if len(_counts(cluster, ranks)) > 1:
            cards = on_cluster(cluster, ranks).num_nics
            asked.update({node: cards for node in {cluster.node_of(rank) for rank in ranks}})
    return min(1.0, cluster.node.num_nics / max(asked.values())) if asked else 1.0


def _counts(cluster: Cluster, ranks: Iterable[int]) -> tuple[int, ...]:
    ranks = tuple(ranks)
    if not ranks:
        raise ValueError("a group has 1 rank or more, not 0")
    twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
    if twice:
        raise ValueError(f"a group has each rank once; rank {twice[0]} is named twice")
    return tuple(Counter(cluster.node_of(rank) for rank in sorted(ranks)).values())
