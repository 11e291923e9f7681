"""What a collective does, by algorithm: messages that follow one another, and bytes through the busiest port.

An algorithm is a tuple of phases, one after the other; `comm` puts prices on them. Bytes are shares of S, the full
unsharded tensor; n ranks, k nodes, g ranks in each. Sources:

    Thakur   Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005
    Raben    Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004
    Sanders  Sanders, Speck, Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009
    NCCL     github.com/NVIDIA/nccl, src/graph/tuning.cc: steps of rings and trees within and between nodes

Left out: Bruck's algorithm, NCCL's in-switch reduction (NVLS, SHARP) and PAT, the time of the additions, and the
filling of a pipeline: ring broadcast, ring reduce and tree count as cut finely enough to hide it.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost.groups import Group

# By collective, the algorithms that are known for it; the first is the one that labkit takes by itself.
ALGORITHMS = {
    "all_reduce": ("ring", "tree", "binomial", "recursive", "hierarchical"),
    "all_gather": ("ring", "recursive", "hierarchical"),
    "reduce_scatter": ("ring", "recursive", "hierarchical"),
    "all_to_all": ("direct", "hierarchical"),
    "broadcast": ("ring", "tree", "binomial", "recursive", "direct", "hierarchical"),
    "reduce": ("ring", "tree", "binomial", "recursive", "direct", "hierarchical"),
    "gather": ("direct", "binomial", "hierarchical"),
    "scatter": ("direct", "binomial", "hierarchical"),
    "send": ("direct",),
    "barrier": ("ring", "tree", "recursive", "hierarchical"),
}
ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True)
class Phase:
    """intra_steps, inter_steps: messages one after another inside nodes, and between them.

    intra_bytes: share of S through the busiest rank's port to its node; inter_bytes: through the busiest node's
    cards, in one direction. one_nic: a single rank does it, so by one card. at_once: both wires work at the same
    time. calls: calls of a collective that it takes. both_ways: bytes go first in, then out of the busiest port.
    """

    intra_steps: int = 0
    inter_steps: int = 0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    one_nic: bool = False
    at_once: bool = False
    calls: int = 1
    both_ways: bool = False


def offered(op: str, group: Group) -> tuple[str, ...]:
    """Algorithms that a group can use for a collective. ValueError for a name that is not a collective's."""
    if op not in ALGORITHMS:
        raise ValueError(f"no collective is called {op!r}; known: {', '.join(ALGORITHMS)}")
    return tuple(name for name in ALGORITHMS[op] if not refusal(name, group))


def refusal(algorithm: str, group: Group) -> str:
    """Why a group cannot use an algorithm, or ""."""
    counts = f"ranks by node are {', '.join(map(str, group.counts))}"
    if group.size == 1:
        return ""
    if algorithm == "recursive" and not (group.even and _power(group.num_nodes) and _power(group.per_node)):
        return f"recursive halving takes a power of two of ranks, equally many in each node; here {counts}"
    if algorithm == "hierarchical" and not (group.even and group.num_nodes > 1 and group.per_node > 1):
        return f"hierarchical takes 2 nodes or more with equally many ranks, 2 or more, in each; here {counts}"
    return ""


def phases(op: str, group: Group, algorithm: str | None = None) -> tuple[Phase, ...]:
    """The phases of a collective; () in a group of one rank, where there is nothing to do.

    ValueError for a collective or algorithm that is not known, or not possible in this group.
    """
    names = offered(op, group)
    chosen = ALGORITHMS[op][0] if algorithm is None else algorithm
    if chosen not in ALGORITHMS[op]:
        raise ValueError(f"{op} has no algorithm {chosen!r}; it has {', '.join(ALGORITHMS[op])}")
    if chosen not in names:
        raise ValueError(refusal(chosen, group))
    if op == "send" and group.size > 2:
        raise ValueError(f"send goes from one rank to one other; the group has {group.size}")
    if group.size == 1:
        return ()
    moved = "all_reduce" if op == "barrier" else op
    made = {
        "ring": _ring,
        "tree": _tree,
        "binomial": _binomial,
        "recursive": _recursive,
        "direct": _direct,
        "hierarchical": _hierarchical,
    }[chosen](moved, group)
    return made if isinstance(made, tuple) else (made,)


def _ring(op: str, group: Group) -> Phase:
    """NCCL: 2(n-1) steps for all_reduce, else n-1, of which 2(k-1) or k-1 between nodes. Thakur, 4.1, 4.4.

    broadcast, reduce: a chain with the tensor in pieces; S through every port.
    """
    n, k = group.size, group.num_nodes
    rounds, crossings = (2 * (n - 1), 2 * (k - 1)) if op == "all_reduce" else (n - 1, k - 1)
    share = 1.0 if op in ROOTED else rounds / n
    return Phase(rounds - crossings, crossings, share * (n > k), share * (k > 1), at_once=True)


def _tree(op: str, group: Group) -> Phase:
    """NCCL: a chain inside each node, two binary trees between nodes, each with half the tensor (Sanders).

    all_reduce goes up and down: 2(g-1) steps inside and 2 ceil(log2 k) between, 2 S through the busiest port (1.5 S
    when there are three, S when two). broadcast and reduce go one way: half the steps, S. NCCL also takes 8% off the
    trees' bandwidth, a measured figure that does not stand here.
    """
    g, k = group.per_node, group.num_nodes
    ways = 1 if op in ROOTED else 2
    inside = (g > 1) * (1.0 if ways == 1 else min(2.0, g - 1))
    between = (k > 1) * (1.0 if ways == 1 else min(2.0, k / 2))
    return Phase(ways * (g - 1), ways * _log(k), inside, between, at_once=True)


def _binomial(op: str, group: Group) -> Phase:
    """Thakur, 4.3 and 4.5: ceil(log2 n) rounds of S each for broadcast and reduce, both for all_reduce.

    gather and scatter: the same rounds, and what is not the root's own passes its port once.
    """
    g, k, n = group.per_node, group.num_nodes, group.size
    if op in ("gather", "scatter"):
        return Phase(_log(g), _log(k), (g - 1) / n, (n - g) / n, one_nic=True)
    ways = 1 if op in ROOTED else 2
    inside, between = ways * _log(g), ways * _log(k)
    return Phase(inside, between, float(inside), float(between), one_nic=True, both_ways=ways == 2)


def _recursive(op: str, group: Group) -> Phase:
    """Raben; Thakur, 4.1-4.5: halve and double, near ranks first: log2 n steps and (n-1)/n S each way.

    broadcast is a scatter and an all-gather, reduce a reduce-scatter and a gather: both ways, as all_reduce is.
    """
    g, k = group.per_node, group.num_nodes
    ways = 1 if op in ("all_gather", "reduce_scatter") else 2
    return Phase(ways * _log(g), ways * _log(k), ways * (g - 1) / g, ways * (k - 1) / k)


def _direct(op: str, group: Group) -> Phase:
    """Every message straight to its destination, one after another. all_to_all: Thakur, 4.2, long messages.

    broadcast and reduce are a star: S times n-1 through the root's port.
    """
    g, n = group.per_node, group.size
    if op == "send":
        return Phase(1, 0, 1.0, 0.0) if group.num_nodes == 1 else Phase(0, 1, 0.0, 1.0, one_nic=True)
    if op == "all_to_all":
        leaving = max(count * (n - count) for count in group.counts) / n
        return Phase(g - 1, n - min(group.counts), (g - 1) / n, leaving, at_once=True)
    share = 1.0 if op in ROOTED else 1 / n
    return Phase(g - 1, n - g, (g - 1) * share, (n - g) * share, one_nic=True)


def _hierarchical(op: str, group: Group) -> tuple[Phase, ...]:
    """First inside nodes, then between ranks of the same place in every node, and back: a collective per level.

    all_reduce sends 2(k-1)/k S out of a node where the flat ring sends 2(n-1)/n S (Thakur's ring at each level).
    """
    g, k, n = group.per_node, group.num_nodes, group.size
    inside, between = Phase(g - 1, 0, (g - 1) / g), Phase(0, k - 1, 0.0, (k - 1) / k)
    if op == "all_reduce":
        return inside, Phase(0, 2 * (k - 1), 0.0, 2 * (k - 1) / k), inside
    if op in ("all_gather", "reduce_scatter"):
        return inside, between
    if op == "all_to_all":
        return inside, Phase(0, k - 1, 0.0, g * (k - 1) / k)
    if op in ROOTED:
        return Phase(g - 1, 0, 1.0), Phase(0, k - 1, 0.0, 1.0, one_nic=True)
    return Phase(g - 1, 0, (g - 1) / n), Phase(0, k - 1, 0.0, (k - 1) / k, one_nic=True)


def _log(n: int) -> int:
    """ceil(log2 n)."""
    return (n - 1).bit_length()


def _power(n: int) -> bool:
    return n & (n - 1) == 0
