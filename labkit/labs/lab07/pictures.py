"""Data behind lab 07's pictures: idle shares of recorded steps, what ranks keep, bytes on the wire, a table of bubbles.

Recorded steps come from `engines`, formulas from `labkit.cost` and `labkit.schedule`. Left out: drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.check.table import table
from labkit.cost import comm
from labkit.cost.links import FREE
from labkit.cost.parts import Cluster, Device, Link, Node
from labkit.cost.shapes import Shape, layer_parameters
from labkit.schedule import theory
from labkit.schedule.actions import Schedule, most_kept
from labkit.schedule.classic import gpipe, interleaved, one_f_one_b
from labkit.schedule.timing import play
from labkit.schedule.zero_bubble import zb_h1, zb_v

if TYPE_CHECKING:
    from labkit.record.events import RankRecord
    from labkit.record.timeline import Replay

# Slow arithmetic, fast memory: time is FLOPs, and stages of equal FLOPs take equally long.
SLOW = Device("ideal", (("fp32", 5e9),), 2**34, 1e12)


def on_link(records: Sequence[RankRecord], link: Link = FREE) -> Replay:
    """A recorded step replayed on equal devices, by default with a link that costs nothing."""
    from labkit.record.prices import prices
    from labkit.record.replay import replay

    return replay(records, prices(Cluster(Node("ideal", SLOW, len(records), link))))


def kept_bytes(records: Sequence[RankRecord]) -> list[int]:
    """Per rank, the most bytes of activations at any moment of the step."""
    from labkit.record.held import held

    return [max(held(record).by_kind["activation"], default=0) for record in records]


def head_in_layers(shape: Shape) -> float:
    """The head's work in layers' worth: its FLOPs over a layer's products, which go as the parameters."""
    return shape.vocab * shape.hidden / layer_parameters(shape)


def stage_times(split: Sequence[int], embedding: float, head: float) -> list[float]:
    """Per stage, time in layers."""
    times = [float(count) for count in split]
    times[0] += embedding
    times[-1] += head
    return times


@dataclass(frozen=True)
class Bubble:
    """A schedule's idle share: by formula, and played. kept: the most in flight on a rank, in 1F1B's microbatches."""

    name: str
    formula: str
    theory: float
    played: float
    kept: float

    @property
    def overhead(self) -> float:
        """Idle time over the work."""
        return self.played / (1 - self.played)


def five(p: int, m: int, v: int = 2) -> tuple[tuple[Schedule, str, float], ...]:
    """Five schedules, each with the formula and the value of its idle share when F = I = W. ValueError for microbatches
    that are no multiple of the ranks."""
    h1 = theory.zb_h1_idle_s(p, 1, 1, 1)
    return (
        (gpipe(p, m), "(p-1)/(m+p-1)", theory.idle_share(p, m)),
        (one_f_one_b(p, m), "(p-1)/(m+p-1)", theory.idle_share(p, m)),
        (interleaved(p, m, v), "(p-1)/(mv+p-1)", theory.idle_share(p, m, v)),
        (zb_h1(p, m), "(p-1)(F+I-W)", h1 / (h1 + 3 * m)),
        (zb_v(p, m), "(p-1)/(6m+p-1)", theory.zero_bubble_idle_share(p, m, 2)),
    )


def bubbles(p: int, m: int, v: int = 2) -> tuple[Bubble, ...]:
    """The five, played with F = I = W. ValueError as `five`."""
    return tuple(
        Bubble(schedule.name, formula, share, play(schedule).idle_share, max(most_kept(schedule)))
        for schedule, formula, share in five(p, m, v)
    )


def bubbles_table(p: int, m: int, v: int = 2) -> str:
    """The same as text, both shares."""
    rows = [
        (each.name, each.formula, f"{each.theory:.1%}", f"{each.played:.1%}", f"{each.overhead:.1%}", f"{each.kept:g}")
        for each in bubbles(p, m, v)
    ]
    return table(("", "formula", "of all time", "played", "on top of the work", "in flight"), rows)


def with_messages(schedule: Schedule, shape: Shape, tokens: int, device: Device, link: Link) -> float:
    """Idle share of a model's step when messages take their time and computing goes at the device's peak, in bf16.

    tokens: of a microbatch. A stage has its share of the layers, and takes twice as long backward (I and W each as long
    as F); embedding and head are left out.
    """
    layers = shape.layers / schedule.num_stages
    forward_s = 2 * layer_parameters(shape) * layers * tokens / device.peak("bf16")
    hand_over = link.alpha_s + 2 * tokens * shape.hidden / link.bandwidth
    return play(schedule, forward_s, forward_s, forward_s, hand_over).idle_share


@dataclass(frozen=True)
class Wire:
    """Bytes that a GPU in the middle sends for one microbatch, forward and backward."""

    pipeline: float
    tensor: float

    @property
    def times(self) -> float:
        return self.tensor / self.pipeline


def wire(shape: Shape, ranks: int, tokens: int, element_bytes: int = 2) -> Wire:
    """A model cut into stages sends one hidden state on and one gradient back; cut by tensor parallel, four all_reduces
    a layer (arXiv:1909.08053, section 3)."""
    hidden = tokens * shape.hidden * element_bytes
    return Wire(2 * hidden, 4 * shape.layers * comm.sent_bytes("all_reduce", hidden, ranks))
