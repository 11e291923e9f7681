"""Buckets cut anew, in virtual time: what a recorded step would take with buckets of another size, anywhere.

From a recorded step come its ops and when each gradient is there; `labkit.cost` puts prices on ops and all_reduces.
Buckets follow one another on one network, each from when its last gradient is there: the chain that
`labkit.record.measures.chain_time_s` adds up, here with the copies into buckets and the means. Left out: ranks that
differ, cores that ranks share, and the time between two ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit.cost import comm
from labkit.cost.groups import Group, on_cluster, on_link
from labkit.cost.parts import Cluster, Device, Link
from labkit.labs.lab02.recorded import Step


@dataclass(frozen=True)
class Backward:
    """A step on a device. forward_s, compute_s: until when it computes forward, and all. Per parameter, in the order of
    `model.parameters()`: num_bytes of its gradient, and ready_s, when it is there.
    """

    forward_s: float
    compute_s: float
    num_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]


@dataclass(frozen=True)
class Bucket:
    """num_bytes; ready_s: when its last gradient is there and it is filled; all_reduced from start_s to end_s."""

    num_bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Cut:
    """A step with its buckets, in order of issue. busy: (start_s, end_s) of what the device does after forward:
    backward with the filling of buckets, then the mean of each. exposed_s: seconds in which it stands still.
    """

    buckets: tuple[Bucket, ...]
    busy: tuple[tuple[float, float], ...]
    time_s: float
    exposed_s: float


def backward_of(step: Step, device: Device, dtype: str = "fp32") -> Backward:
    """When gradients are there on a device, by the recorded ops of rank 0.

    Raises ValueError for a step that communicates before its last gradient is there: its ops are not the model's alone.
    """
    from labkit.record.prices import prices

    last = max(event for event, _ in step.gradients)
    if any(event.index < last for event in step.records[0].communications):
        raise ValueError("give a step that averages after backward: this one communicates while it goes on")
    price = prices(_alone(device), dtype)
    now, ended = 0.0, []
    for event in step.records[0].events[: last + 1]:
        now += 0.0 if event.view else price.op(0, event)
        ended.append(now)
    ready_s = tuple(ended[event] for event, _ in step.gradients)
    return Backward(ended[step.backward - 1], now, tuple(size for _, size in step.gradients), ready_s)


def filled(sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """Positions of the parameters in each bucket: from the last to the first, at most bucket_bytes in each, one that is
    larger alone.
    """
    buckets: list[list[int]] = []
    room = 0.0
    for place in reversed(range(len(sizes))):
        if not buckets or sizes[place] > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(place)
        room -= sizes[place]
    return buckets


def recut(backward: Backward, bucket_bytes: float, device: Device, group: Group, copies: bool = True) -> Cut:
    """The step with buckets of at most bucket_bytes, on a device and in a group of ranks.

    A bucket is sent when it and those before it are full. copies: count that every bucket is read and written as it is
    filled, and again for its mean. Without them time_s is `chain_time_s` of the buckets.
    """
    line = comm.line("all_reduce", group)
    found, busy, full_s, late_s, network_s = [], [], 0.0, 0.0, 0.0
    for places in filled(backward.num_bytes, bucket_bytes):
        num_bytes = sum(backward.num_bytes[place] for place in places)
        late_s += device.time_s(0.0, 2 * num_bytes) if copies else 0.0
        full_s = max(full_s, *(backward.ready_s[place] for place in places))
        start_s = max(full_s + late_s, network_s)
        network_s = start_s + line.time_s(num_bytes)
        found.append(Bucket(num_bytes, full_s + late_s, start_s, network_s))
    now = backward.compute_s + late_s
    busy.append((backward.forward_s, now))
    exposed_s = 0.0
    for bucket in found:
        exposed_s += max(0.0, bucket.end_s - now)
        now = max(now, bucket.end_s)
        if copies:
            busy.append((now, now + device.time_s(0.0, 2 * bucket.num_bytes)))
            now = busy[-1][1]
    return Cut(tuple(found), tuple(busy), now, exposed_s)


def one_by_one(backward: Backward, device: Device, group: Group) -> Cut:
    """The naive step: after backward, an all_reduce per parameter, each waited for before its mean is taken."""
    line = comm.line("all_reduce", group)
    found, busy, now = [], [(backward.forward_s, backward.compute_s)], backward.compute_s
    for num_bytes in backward.num_bytes:
        found.append(Bucket(num_bytes, now, now, now + line.time_s(num_bytes)))
        busy.append((found[-1].end_s, found[-1].end_s + device.time_s(0.0, 2 * num_bytes)))
        now = busy[-1][1]
    exposed_s = sum(bucket.end_s - bucket.start_s for bucket in found)
    return Cut(tuple(found), tuple(busy), now, exposed_s)


def by_formula(step: Step, cluster: Cluster, bucket_bytes: float | None = None) -> float:
    """Seconds of the step on a cluster by the chain formula alone: no copies. bucket_bytes None: the naive step."""
    from labkit.record.measures import chain_time_s

    device, group = cluster.node.device, on_cluster(cluster)
    backward, line = backward_of(step, device), comm.line("all_reduce", group)
    if bucket_bytes is None:
        return backward.compute_s + sum(map(line.time_s, backward.num_bytes))
    buckets = recut(backward, bucket_bytes, device, group, copies=False).buckets
    ready = [bucket.ready_s for bucket in buckets]
    return chain_time_s(ready, [line.time_s(bucket.num_bytes) for bucket in buckets], backward.compute_s)


def against_the_clock(
    names: Sequence[str], formula: Sequence[float], replayed: Sequence[float], clock: Sequence[float]
) -> str:
    """How far formula and replay are from the clock, per way of averaging, and what can make the clock slower or
    faster than the formula, whichever there was. Seconds; Markdown.
    """
    rows = list(zip(names, formula, replayed, clock, strict=True))
    told = [f"{name}: formula {f / c - 1:+.0%}, replay {r / c - 1:+.0%}" for name, f, r, c in rows]
    slower, faster = (", ".join(n for n, f, _, c in rows if sign * (c - f) > 0) for sign in (1, -1))
    why = []
    if slower:
        why.append(
            f"Slower than the formula ({slower}): it forgets copies and the time between ops, gloo needs cores that "
            "backward needs, and other programs run too."
        )
    if faster:
        why.append(
            f"Faster than the formula ({faster}): this machine's figures may be from a busier moment, and what lies in "
            "a cache is read faster than they say."
        )
    return f"**Against the clock:** {'; '.join(told)}.\n\n{' '.join(why)}".rstrip()


def efficiencies(
    step: Step, device: Device, link: Link, ranks: Sequence[int], bucket_bytes: float | None = None
) -> list[float]:
    """Per number of ranks, the share of a step in which a device computes what it would have to compute alone.

    Every rank keeps its batch (weak scaling). bucket_bytes None: one all_reduce a parameter, after backward.
    """
    backward, found = backward_of(step, device), []
    for n in ranks:
        group = on_link(n, link)
        cut = one_by_one(backward, device, group)
        if bucket_bytes is not None:
            cut = recut(backward, bucket_bytes, device, group)
        found.append(1.0 if n == 1 else backward.compute_s / cut.time_s)
    return found


def _alone(device: Device) -> Cluster:
    from labkit.cost.links import FREE
    from labkit.cost.parts import Node

    return Cluster(Node(device.name, device, 1, FREE))
