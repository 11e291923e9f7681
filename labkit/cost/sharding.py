"""Bytes that ZeRO sends in one optimizer step: plain, hybrid (HSDP, MiCS), ZeRO++, and with experts of their own.

As `moved`: of one device, by axis and collective. Left out: the scales of quantised blocks, and DeepSpeed's own ways
(all_reduce at stages 1 and 2 on some backends).
"""

from __future__ import annotations

from collections import Counter

from labkit.cost import comm, memory, states
from labkit.cost.layout import Layout
from labkit.cost.shapes import Shape

Sent = dict[str, dict[str, float]]


def data_parallel(shape: Shape, layout: Layout, stage: int) -> Sent:
    """Of axis dp, and of axis shard where a group of ranks or a node shards by itself."""
    copies = memory.rank_parameters(shape, layout, stage)
    if layout.quantised:
        return zeropp(layout, *copies[0])
    if layout.shard_within:
        return hybrid(layout, *copies[0])
    found: Counter[str] = Counter()
    for count, ranks in copies:
        found.update(zero(layout, count, ranks))
    return {"dp": dict(found)}


def zero(layout: Layout, num_parameters: int, ranks: int) -> dict[str, float]:
    """ZeRO, arXiv:1910.02054, section 7: gradients once (2 P), at stage 3 parameters twice and gradients (3 P).

    In (n-1)/n of it. With m microbatches stage 2 reduces each one's gradients, and stage 3 gathers and reduces for
    each.
    """
    m = layout.microbatches
    gradients, parameters = sizes(layout, num_parameters)
    if layout.zero == 0:
        return {"all_reduce": comm.sent_bytes("all_reduce", gradients, ranks)}
    scattered = comm.sent_bytes("reduce_scatter", gradients, ranks) * (m if layout.zero >= 2 else 1)
    gathered = comm.sent_bytes("all_gather", parameters, ranks) * (2 * m if layout.zero == 3 else 1)
    return {"reduce_scatter": scattered, "all_gather": gathered}


def hybrid(layout: Layout, num_parameters: int, within: int) -> Sent:
    """ZeRO within a group, and what a rank's part of the gradients takes to be reduced among the groups.

    PyTorch FSDP, arXiv:2304.11277, section 3.2.2; MiCS, arXiv:2205.00119.
    """
    part = sizes(layout, num_parameters)[0] / within
    times = layout.microbatches if layout.zero >= 2 else 1
    across = comm.sent_bytes("all_reduce", part, layout.shards // within) * times
    return {"shard": zero(layout, num_parameters, within), "dp": {"all_reduce": across}}


def zeropp(layout: Layout, num_parameters: int, ranks: int) -> Sent:
    """ZeRO++, arXiv:2306.10209, section 3, at stage 3. M: parameters, or gradients, in 16 bits.

    qwz: weights are gathered in 8 bits, M/2. hpz: for the backward they are gathered within the node, from a second
    copy there. qgz: gradients go by two all_to_alls in 4 bits, M/4 in the node and M/4 over its ranks between nodes.
    """
    m, node, on = layout.microbatches, layout.node_ranks, layout.quantised
    gradients, parameters = sizes(layout, num_parameters)
    wire = num_parameters if "qwz" in on else parameters
    found: Sent = {"dp": {"all_gather": m * comm.sent_bytes("all_gather", wire, ranks)}, "shard": {}}
    if "hpz" in on:
        found["shard"]["all_gather"] = m * comm.sent_bytes("all_gather", parameters, node)
    else:
        found["dp"]["all_gather"] *= 2
    if "qgz" in on:
        found["shard"]["all_to_all"] = m * comm.sent_bytes("all_to_all", num_parameters / 2, node)
        found["dp"]["all_to_all"] = m * comm.sent_bytes("all_to_all", num_parameters / 2 / node, ranks // node)
    else:
        found["dp"]["reduce_scatter"] = m * comm.sent_bytes("reduce_scatter", gradients, ranks)
    return found


def crossing(layout: Layout, num_parameters: int) -> dict[str, float]:
    """Bytes that leave a node in one microbatch of stage 3: of the forward's gather, the backward's, the gradients.

    A ring leaves a node by one of its ranks, an all_to_all by all of them. Many nodes: (n-1)/n is 1.
    """
    on = layout.quantised
    gradients, parameters = sizes(layout, num_parameters)
    forward = num_parameters if "qwz" in on else parameters
    return {
        "forward": forward,
        "backward": 0 if "hpz" in on else forward,
        "gradients": num_parameters / 2 if "qgz" in on else gradients,
    }


def sizes(layout: Layout, num_parameters: int) -> tuple[int, int]:
    """(gradients, parameters) in bytes, as they are sent."""
    return (
        num_parameters * memory.communicated_gradient_bytes(layout),
        num_parameters * states.element_bytes(layout.precision),
    )
