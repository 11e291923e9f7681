"""What a collective costs: its time by algorithm in the alpha-beta model, its bandwidths, and which one is fastest.

A message of S bytes takes alpha_s + S / bandwidth; a collective adds up its messages (`algorithms` has the formulas
and their sources). Everywhere `num_bytes` is nccl-tests' S, the full unsharded tensor: what a rank holds after an
all_gather, and before a reduce_scatter. A group of one rank is free. Left out: congestion, except that groups which
share network cards can be given a part of them (`groups`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from labkit.cost.algorithms import Phase, offered, phases
from labkit.cost.groups import Group, on_link
from labkit.cost.parts import Link


@dataclass(frozen=True)
class Line:
    """Time is a line in S: latency_s + num_bytes * s_per_byte."""

    latency_s: float
    s_per_byte: float

    def time_s(self, num_bytes: float) -> float:
        """ValueError for a size that is negative or not a number."""
        _sized(num_bytes)
        return self.latency_s + num_bytes * self.s_per_byte


def time_s(op: str, num_bytes: float, n: int, link: Link, algorithm: str | None = None) -> float:
    """Seconds of a collective among n ranks over one kind of link, as in textbooks: ring all_reduce takes
    2(n-1) alpha + 2(n-1)/n S / bandwidth.

    algorithm: one of `choices`; by default the first. ValueError for what is not known or cannot be.
    """
    return line(op, on_link(n, link), algorithm).time_s(num_bytes)


def group_time_s(op: str, num_bytes: float, group: Group, algorithm: str | None = None) -> float:
    """Seconds of a collective in a group that may span nodes (`groups.on_cluster`). Errors as `time_s`."""
    return line(op, group, algorithm).time_s(num_bytes)


def line(op: str, group: Group, algorithm: str | None = None) -> Line:
    """Latency and seconds per byte of a collective. Errors as `time_s`."""
    steps = phases(op, group, algorithm)
    if op == "barrier":
        return Line(sum(_latency_s(phase, group) for phase in steps), 0.0)
    return Line(sum(_latency_s(phase, group) for phase in steps), sum(_per_byte(phase, group) for phase in steps))


def choices(op: str, group: Group) -> tuple[str, ...]:
    """Algorithms that a group can use for a collective, the usual one first."""
    return offered(op, group)


def fastest(op: str, num_bytes: float, group: Group, among: Iterable[str] | None = None) -> str:
    """The algorithm that takes the least time at this size; of equals, the one named first.

    among: the algorithms to choose from, by default all of `choices`.
    """
    names = choices(op, group) if among is None else tuple(among)
    return min(names, key=lambda algorithm: group_time_s(op, num_bytes, group, algorithm))


def crossover_bytes(op: str, group: Group, one: str, other: str) -> float | None:
    """The size at which two algorithms take equally long: one is faster below, the other above.

    None where one of them is faster at every size, or they never differ.
    """
    first, second = line(op, group, one), line(op, group, other)
    slower, slope = second.latency_s - first.latency_s, first.s_per_byte - second.s_per_byte
    if slope == 0 or slower / slope <= 0:
        return None
    return slower / slope


def leaving_bytes(op: str, num_bytes: float, group: Group, algorithm: str | None = None) -> float:
    """Bytes through the network cards of the busiest node, in its busier direction; 0 inside one node.

    In a group of `groups.on_link`, where every rank is a node of its own: the bytes of the busiest rank.
    """
    _sized(num_bytes)
    moved = sum(phase.inter_bytes / (2 if phase.both_ways else 1) for phase in phases(op, group, algorithm))
    return 0.0 if op == "barrier" else num_bytes * moved


def sent_bytes(op: str, num_bytes: float, n: int) -> float:
    """Bytes that the busiest rank sends: ring for all_reduce, all_gather, reduce_scatter, a chain for broadcast and
    reduce, directly for the others. Equal parts; `traffic` has every rank's bytes, to the byte.
    """
    _possible(op, n)
    _sized(num_bytes)
    if n == 1 or op == "barrier":
        return 0.0
    if op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scatter"):
        return num_bytes * bus_factor(op, n)
    return num_bytes / n if op == "gather" else float(num_bytes)


def bus_factor(op: str, n: int) -> float:
    """busbw / algbw as nccl-tests defines it: what makes busbw the speed of a wire, whatever n is.

    all_reduce 2(n-1)/n; all_gather, reduce_scatter, all_to_all, gather, scatter (n-1)/n; broadcast, reduce, send 1.
    Source: nccl-tests, doc/PERFORMANCE.md, and src/gather.cu and scatter.cu. ValueError for n below 1, and for
    barrier, which has no bandwidth.
    """
    _possible(op, n)
    if op == "barrier":
        raise ValueError("a barrier moves no bytes: it has no bandwidth")
    if op in ("broadcast", "reduce", "send"):
        return 1.0
    return (2 if op == "all_reduce" else 1) * (n - 1) / n


def algbw(num_bytes: float, time_s: float) -> float:
    """Bytes per second that the caller sees: S / time (nccl-tests). ValueError for a time that is not above 0."""
    _sized(num_bytes)
    if not time_s > 0:
        raise ValueError(f"time_s must be more than 0, not {time_s!r}")
    return num_bytes / time_s


def busbw(op: str, num_bytes: float, n: int, time_s: float) -> float:
    """Bytes per second of a wire, to be compared with a link's bandwidth: algbw times `bus_factor` (nccl-tests)."""
    return algbw(num_bytes, time_s) * bus_factor(op, n)


def link_of(
    name: str, op: str, n: int, latency_s: float, s_per_byte: float, algorithm: str | None = None, source: str = ""
) -> Link:
    """The link on which a collective among n ranks would take latency_s + S * s_per_byte: a fitted line, undone.

    The latency is put on messages alone (call_s is 0). ValueError when n is 1, or a figure is not positive.
    """
    steps = phases(op, on_link(n, Link("any", 0.0, 1.0)), algorithm)
    if not steps or op == "barrier":
        raise ValueError(f"{op} among {n} moves nothing: no link can be read off it")
    if not (latency_s >= 0 and s_per_byte > 0):
        raise ValueError(f"{name}: latency_s must be 0 or more and s_per_byte more than 0: {latency_s}, {s_per_byte}")
    messages = sum(phase.inter_steps for phase in steps)
    share = sum(phase.inter_bytes for phase in steps)
    return Link(name, latency_s / messages, share / s_per_byte, 0.0, source)


def _latency_s(phase: Phase, group: Group) -> float:
    inter_s = group.inter.alpha_s if group.inter else 0.0
    wires = group.inter if group.inter and phase.inter_steps else group.intra
    return phase.calls * wires.call_s + phase.intra_steps * group.intra.alpha_s + phase.inter_steps * inter_s


def _per_byte(phase: Phase, group: Group) -> float:
    cards = min(1.0, group.num_nics) if phase.one_nic else group.num_nics
    inside = phase.intra_bytes / group.intra.bandwidth
    between = phase.inter_bytes / (cards * group.inter.bandwidth) if phase.inter_bytes else 0.0
    return max(inside, between) if phase.at_once else inside + between


def _possible(op: str, n: int) -> None:
    """ValueError for a collective that is not known and for a number of ranks that it cannot have."""
    one = Link("any", 0.0, 1.0)
    phases(op, on_link(min(n, 3) if isinstance(n, int) else n, one))


def _sized(num_bytes: float) -> None:
    if not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise ValueError(f"num_bytes must be 0 or more, not {num_bytes!r}")
