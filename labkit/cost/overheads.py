"""What a device needs besides the parts that papers count: gradients of activations in flight and copies of logits,
gaps in the allocator, NCCL's buffers, the CUDA context.

GAPS is the one fitted constant: by least squares on measured peaks of torch's reserved memory over what is counted, on
two runs of torchtitan (tests/cost/measured.py names them, and tries the rest unseen). Left out: what other processes
and the driver keep of a device, gaps that grow over hours of training, cuBLAS' workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.cost.layout import Layout
from labkit.cost.memory import Memory, activation_bytes
from labkit.cost.moments import layer_gradients, loss_bytes
from labkit.cost.shapes import Shape

MIB = 2**20
GAPS = 0.062
# pytorch/pytorch issues 107667, 109888: 300 to 400 MB with kernels loaded lazily; LMCache issue 4019: 616 MiB.
CONTEXT_BYTES = 600 * MIB
# NCCL's init.cc: a channel's FIFOs for the protocols Simple (NCCL_BUFFSIZE), LL128 and LL; a ring has one of each for
# every channel, of which there are up to 32 among devices with fast links (MAXCHANNELS is 32, in new versions 64).
CHANNEL_BYTES = 4 * MIB + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
CHANNELS = 32


@dataclass(frozen=True)
class Overheads:
    """Bytes on one device. in_flight: of the moment at which most is in flight, beyond the parts that are summed."""

    in_flight: int
    gaps: int
    nccl: int
    context: int

    @property
    def total(self) -> int:
        return self.in_flight + self.gaps + self.nccl + self.context


def overheads(shape: Shape, layout: Layout, held: Memory) -> Overheads:
    """Of a device that holds `held`. A program's parts (`programs`) are those of its fullest moment: nothing more is in
    flight then."""
    flight = in_flight(shape, layout, held) if layout.program == "common" else 0
    gaps = round(GAPS * (held.total + flight))
    return Overheads(flight, gaps, communicators(layout) * CHANNELS * CHANNEL_BYTES, CONTEXT_BYTES)


def in_flight(shape: Shape, layout: Layout, held: Memory) -> int:
    """At the loss, copies of the logits instead of a layer that is recomputed; in a layer's backward, the gradients of
    its activations instead of the logits: the larger of the two, as far as it is more than the parts' sum."""
    at_loss = -held.recomputed
    if held.stage == layout.pp - 1:
        counted = activation_bytes(shape, layout, held.stage)[1]
        at_loss += max(0.0, loss_bytes(shape, layout) - counted)
    in_layer = layer_gradients(shape, layout) - held.logits
    return max(0, round(max(at_loss, in_layer)))


def communicators(layout: Layout) -> int:
    """Groups that this device communicates in, each with buffers of its own (NVIDIA/nccl issue 864): one for each axis
    of more than one rank, and one that spans all of them when there are several axes.

    Of dp they are those in which `sharding` sends, of ep those of `moved.expert_parallel`.
    """
    axes = (layout.divided, *data_parallel_groups(layout), layout.ep, layout.tp, layout.cp, layout.pp)
    count = sum(size > 1 for size in axes)
    return count + (1 if count > 1 else 0)


def data_parallel_groups(layout: Layout) -> tuple[int, ...]:
    """Ranks of each group beside the one over which ZeRO divides: what holds copies of the same part (hybrid sharding,
    experts), and for ZeRO++ the node's, and that of a place in all nodes."""
    node = layout.node_ranks
    if layout.quantised & {"hpz", "qgz"}:
        return (node, layout.shards // node) if "qgz" in layout.quantised else (node,)
    copies = layout.shards // layout.shard_within if layout.shard_within else 1
    return (copies, layout.shards // layout.ep if layout.ep > 1 else 1)
