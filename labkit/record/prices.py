"""What the events of a record cost on a cluster, in seconds: what a replay asks.

Formulas and figures are those of `labkit.cost`: an op by the roofline of its device, a collective by its
algorithm's line, a message by the link it crosses. Left out: the start of a kernel, caches, how much of its peak a
kernel reaches (a record does not know the dtype of an op, so one is taken for all), and which part of a collective
that works inside nodes and between them at the same time is held up by a shared card: all of it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from labkit.cost import comm
from labkit.cost.groups import on_cluster
from labkit.cost.parts import Cluster
from labkit.record.events import Collective, Op

# Ops that only ask for memory: nothing is read or written, whatever their result's size.
_ALLOCATES = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}


def _no_card(senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[str, ...]:
    return ()


def _own_cores(rank: int) -> None:
    return None


def _no_stretch(busy: float) -> float:
    return 1.0


@dataclass(frozen=True)
class Prices:
    """What things cost, in seconds.

    op(rank, op): on the compute stream. collective(collective) and message(source, destination, num_bytes):
    (latency, transfer).
    nics(senders, receivers): names of the network cards that such a communication crosses, each in one direction.
    Transfers that cross one at the same time share it equally; latencies do not.
    host(rank): the node whose cores a rank shares with others, None where it computes on a device of its own.
    stretch(busy): how many times longer computing takes on such a node while there is work for `busy` cores: 1 for a
    rank that computes, busy_share for each rank of a transfer. Transfers are
    priced as they are at a stretch of at_rest.
    """

    op: Callable[[int, Op], float]
    collective: Callable[[Collective], tuple[float, float]]
    message: Callable[[int, int, int], tuple[float, float]]
    nics: Callable[[tuple[int, ...], tuple[int, ...]], tuple[str, ...]] = _no_card
    host: Callable[[int], int | None] = _own_cores
    stretch: Callable[[float], float] = _no_stretch
    busy_share: float = 1.0
    at_rest: float = 1.0


def prices(cluster: Cluster, dtype: str = "fp32", algorithms: Mapping[str, str] | None = None) -> Prices:
    """Prices on a cluster, whose ranks are numbered node by node.

    dtype: of the arithmetic. algorithms: per collective, where it is not the usual one: {"broadcast": "binomial"}.
    Raises ValueError for a dtype that the device has not; the prices raise it for ranks that the cluster has not,
    and for an algorithm that a group cannot use.
    """
    node, device = cluster.node, cluster.node.device
    device.peak(dtype)
    chosen = dict(algorithms or {})
    roofline = functools.cache(lambda flops, num_bytes: device.time_s(flops, num_bytes, dtype))

    @functools.cache
    def line(op: str, ranks: tuple[int, ...]) -> tuple[float, float]:
        found = comm.line(op, on_cluster(cluster, ranks), chosen.get(op))
        return found.latency_s, found.s_per_byte

    def op(rank: int, event: Op) -> float:
        if ".".join(event.name.split(".")[:2]) in _ALLOCATES:
            return 0.0
        return roofline(event.flops, event.read_bytes + event.written_bytes)

    def collective(event: Collective) -> tuple[float, float]:
        op, num_bytes = event.op, event.num_bytes
        if event.is_sparse:  # gathers what the ranks have
            op, num_bytes = "all_gather", num_bytes * len(event.ranks)
        latency_s, s_per_byte = line(op, event.ranks)
        return latency_s, num_bytes * s_per_byte

    def message(source: int, destination: int, num_bytes: int) -> tuple[float, float]:
        if source == destination:
            return 0.0, 0.0
        latency_s, s_per_byte = line("send", (source, destination))
        return latency_s, num_bytes * s_per_byte

    nics = functools.cache(functools.partial(_cards, cluster))
    if not node.cores:
        return Prices(op, collective, message, nics)
    return _on_cores(Prices(op, collective, message, nics), cluster)


def _on_cores(own: Prices, cluster: Cluster) -> Prices:
    """The same where ranks share cores: there a latency is the work of handing over, as much as a transfer is.

    Its figures are taken while all ranks communicate, and none computes.
    """
    node = cluster.node
    return replace(
        own,
        collective=lambda event: (0.0, sum(own.collective(event))),
        message=lambda source, destination, num_bytes: (0.0, sum(own.message(source, destination, num_bytes))),
        host=cluster.node_of,
        stretch=functools.cache(node.stretch),
        busy_share=node.busy_share,
        at_rest=node.stretch(node.count * node.busy_share),
    )


def counting_rounds() -> Prices:
    """Computing is free and a message takes 1, whatever its size: a replay's time is the number of rounds, a round
    being one message out and one in per rank (alpha 1, beta 0). Collectives are free as well.
    """
    return Prices(lambda rank, op: 0.0, lambda event: (0.0, 0.0), lambda source, destination, num_bytes: (1.0, 0.0))


def _cards(cluster: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[str, ...]:
    """Cards used, out of the senders' nodes and into the receivers'; () within one node.

    A node's cards are shared out evenly among its devices, as in `labkit.cost.groups`; cards that one device has to
    itself count as one.
    """
    node = cluster.node
    if len({cluster.node_of(rank) for rank in (*senders, *receivers)}) < 2:
        return ()
    cards = min(node.num_nics, node.count)
    found = set()
    for ranks, way in ((senders, "out"), (receivers, "in")):
        for rank in ranks:
            found.add(f"node {cluster.node_of(rank)} card {rank % node.count * cards // node.count} {way}")
    return tuple(sorted(found))
