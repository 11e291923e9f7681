"""What a training run needs of one device: bytes, FLOPs and traffic, and whether it fits; with every assumption said.

`estimate` is what `labkit estimate` prints. Whether it fits is decided by all that is needed: the parts that papers
count, and the overheads. Left out: how long a step takes with everything that overlaps; `gpu_time_s` only compares
layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from labkit.cost import flops, hardware, shapes, states, tuning
from labkit.cost.layout import Layout, divisors, listed
from labkit.cost.memory import Memory
from labkit.cost.moved import Moved, communication_bytes
from labkit.cost.nodes import NODES
from labkit.cost.overheads import CHANNEL_BYTES, CHANNELS, CONTEXT_BYTES, GAPS, MIB, Overheads, communicators, overheads
from labkit.cost.parts import GIB, Device, Node
from labkit.cost.programs import SOURCES, held
from labkit.cost.shapes import Shape

VERSION = 2  # of the JSON object: since 2 what is needed has the overheads in it


@dataclass(frozen=True)
class Estimate:
    """One layout of one model on one kind of device; memory and communication are those of the fullest stage.

    model_flops and hardware_flops: of one step over all devices. gpu_time_s: `gpu_time_s`.
    """

    shape: Shape
    layout: Layout
    device: Device
    parameters: int
    memory: Memory
    overheads: Overheads
    communication: Moved
    model_flops: int
    hardware_flops: int
    gpu_time_s: float

    @property
    def needed_bytes(self) -> int:
        """The parts and the overheads."""
        return self.memory.total + self.overheads.total

    @property
    def free_bytes(self) -> int:
        """Of the device's memory; below 0 for what is missing."""
        return self.device.memory_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0


def estimate(shape: Shape, layout: Layout, device: str | Device = "H100") -> Estimate:
    """ValueError, one line, for a layout that this model cannot have and for a device that is not known or lacks the
    precision."""
    card = hardware.device(device) if isinstance(device, str) else device
    layout = on_nodes(layout, card)
    fullest = held(shape, layout)
    over = overheads(shape, layout, fullest)
    adapters = layout.program.startswith("fsdp_")
    moved = tuning.adapter_traffic(shape, layout) if adapters else communication_bytes(shape, layout, fullest.stage)
    needed = flops.model_flops(shape, layout.tokens, layout.seq, layout.flash)
    done = needed + flops.recomputed(shape, layout.tokens, layout.seq, repeats(layout), layout.flash)
    time_s = gpu_time_s(layout, card, done, moved)
    return Estimate(shape, layout, card, shapes.parameters(shape), fullest, over, moved, needed, done, time_s)


def on_nodes(layout: Layout, device: Device) -> Layout:
    """With the device's node in it. ValueError for more ranks of one than any known node of this device has."""
    box = node_of(device)
    if box is None:
        return layout
    most = max(node.count for node in NODES if node.device.name == device.name)
    if layout.quantised and layout.per_node > max(1, most // layout.tp):
        fit = listed([each for each in divisors(layout.shards) if each <= max(1, most // layout.tp)])
        what = f"tp {layout.tp} x per-node {layout.per_node} is more than the {most} GPUs of a node of {device.name}"
        raise ValueError(f"{what}; per-node {fit} would do")
    return replace(layout, node_gpus=box.count)


def needed_bytes(shape: Shape, layout: Layout) -> int:
    """Parts and overheads of the fullest device, without an estimate's other figures. ValueError as `estimate`."""
    fullest = held(shape, layout)
    return fullest.total + overheads(shape, layout, fullest).total


def repeats(layout: Layout) -> str:
    """What recomputation repeats, as `flops.recomputed` calls it. Flash attention keeps no scores, so that selective
    recomputation has nothing to drop and nothing to repeat; torchtitan's drops every second matrix product."""
    if layout.program == "torchtitan" and layout.recompute == "selective":
        return "second"
    return "none" if layout.flash and layout.recompute == "selective" else layout.recompute


def gpu_time_s(layout: Layout, device: Device, step_flops: float, moved: Moved) -> float:
    """Seconds of all devices together per token, to rank layouts by: FLOPs at the peak, stretched by the pipeline's
    bubble (p-1)/(v m) (arXiv:2104.04473, section 2.2), and bytes at the bandwidth of each axis, nothing overlapped."""
    peak = device.peak(layout.precision)
    busy_s = step_flops / layout.gpus / peak * (1 + (layout.pp - 1) / (layout.interleave * layout.microbatches))
    moving_s = sum(sum(ops.values()) / bandwidth(layout, device, axis) for axis, ops in moved.items())
    return (busy_s + moving_s) * layout.gpus / layout.tokens


def bandwidth(layout: Layout, device: Device, axis: str) -> float:
    """Bytes per second in one direction. Axes are nested tp, cp, dp, pp, the first one innermost, as in Megatron-LM.

    An axis that leaves a node shares its network cards; a device of which no node is known has its own link throughout.
    """
    own = device.nvlink or device.host
    if axis in ("host", "disk"):  # files come through the host; how fast they are is not known here
        return (device.host or own).bandwidth
    box = node_of(device)
    if box is None:
        return own.bandwidth
    inner = layout.tp * layout.shard_within if layout.shard_within else 1  # that of ZeRO++ is a node
    spans = {"tp": layout.tp, "cp": layout.tp * layout.cp, "dp": layout.tp * layout.cp * layout.dp, "pp": layout.gpus}
    spans |= {"shard": inner, "ep": layout.tp * layout.ep}
    if spans[axis] <= box.count or box.nic is None:
        return box.intra.bandwidth
    return min(box.intra.bandwidth, box.nic.bandwidth * box.num_nics / box.count)


def node_of(device: Device) -> Node | None:
    return next((node for node in NODES if node.device.name == device.name), None)


def assumptions(result: Estimate) -> tuple[str, ...]:
    """What the figures rest on, a sentence each."""
    layout, shape = result.layout, result.shape
    if layout.program != "common":
        return _of_program(result)
    each = states.per_parameter(layout.convention, layout.precision, layout.zero)
    copy = f" + {each.gradient_copy} (fp32 copy of gradients)" if each.gradient_copy else ""
    found = [
        f"states ({layout.convention}, {each.source}): {each.parameter} bytes a parameter, {each.gradient} a gradient"
        f"{copy}, {each.optimizer} of Adam",
        f"activations ({layout.activations}): "
        + ("arXiv:2205.05198" if layout.activations == "megatron" else "what torch saves without fused kernels")
        + (", flash attention" if layout.flash else ", scores kept"),
        f"figures are of pipeline stage {result.memory.stage} of {layout.pp}, the fullest"
        if layout.pp > 1
        else "every device holds the same",
        _divided(layout),
        f"a step: dp {layout.dp} x microbatches {layout.microbatches} x {layout.micro_batch} sequences of {layout.seq} "
        f"= {layout.tokens} tokens",
        "FLOPs are those of matrix products" + (", without the scores that are masked" if layout.flash else ""),
        "parts are summed though they do not all peak at once",
        *_overheads(result),
    ]
    found += _sharded(result)
    found += _offloaded(result)
    if layout.flash and layout.recompute == "selective":
        found.append("selective recomputation changes nothing: flash attention keeps no scores")
    if 0 < shape.max_seq < layout.seq:
        found.append(f"seq {layout.seq} is longer than the {shape.max_seq} tokens that {shape.name} was made for")
    if layout.zero and layout.shards == 1:
        found.append("ZeRO divides nothing among one rank: dp x cp is 1")
    return tuple(found)


def _divided(layout: Layout) -> str:
    if layout.ep > 1:
        return f"ZeRO divides experts over {layout.shards // layout.ep}, the rest over dp x cp = {layout.shards}"
    if layout.divided == layout.shards:
        return f"ZeRO divides over dp x cp = {layout.shards}"
    return f"ZeRO divides over {layout.divided} ranks, of which there are {layout.shards // layout.divided} groups"


def _sharded(result: Estimate) -> list[str]:
    layout, shape, found = result.layout, result.shape, []
    if layout.pp > 1:
        found.append("1F1B" if layout.interleave == 1 else f"interleaved 1F1B, {layout.interleave} chunks a rank")
    if shape.experts:
        found.append("experts are split like other matrices (tp), tokens spread evenly over them")
    if layout.ep > 1:
        copies = layout.shards // layout.ep
        how = f"{copies} {'copy' if copies == 1 else 'copies'} of each"
        found.append(f"a layer's {shape.experts} experts lie on {layout.ep} ranks, {how}")
    if layout.quantised:
        on = ", ".join(sorted(layout.quantised))
        found.append(f"ZeRO++ ({on}; arXiv:2306.10209) in nodes of {layout.node_ranks} of the {layout.shards} ranks")
    return found


def _offloaded(result: Estimate) -> list[str]:
    if result.layout.offload == "none":
        return []
    files = f", {gib(result.memory.disk)} of files" if result.memory.disk else ""
    return [f"offloaded: {gib(result.memory.host)} of host memory{files} for each device"]


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _overheads(result: Estimate) -> tuple[str, ...]:
    over = result.overheads
    flight = f"in flight at once, beyond the parts' sum: {gib(over.in_flight)} of logits or gradients of activations"
    return (
        *((flight,) if over.in_flight else ()),
        f"gaps in the allocator: {GAPS:.1%}, fitted on measured runs; CUDA context {CONTEXT_BYTES // MIB} MiB; NCCL "
        f"{CHANNELS * CHANNEL_BYTES / MIB:.0f} MiB a communicator, of which there are {communicators(result.layout)}",
    )


def _of_program(result: Estimate) -> tuple[str, ...]:
    layout = result.layout
    return (
        f"memory is that of {layout.program} ({SOURCES[layout.program]}) at its fullest moment, pipeline stage "
        f"{result.memory.stage} of {layout.pp}",
        *_overheads(result),
        *_offloaded(result),
        "FLOPs are those of training all parameters"
        if layout.program.startswith("fsdp_")
        else "communication and FLOPs are counted as without a program's own ways",
        *(("recomputed are key, output and up matrices: every second product",) if repeats(layout) == "second" else ()),
    )


def as_json(result: Estimate) -> dict[str, Any]:
    """The object that `labkit estimate --json` prints; CONTRIBUTING.md describes it."""
    held, layout = result.memory, result.layout
    return {
        "version": VERSION,
        "model": result.shape.name,
        "parameters": result.parameters,
        "active_parameters": shapes.active_parameters(result.shape),
        "layout": {"gpus": layout.gpus} | {key: getattr(layout, key) for key in layout.__dataclass_fields__},
        "device": result.device.name,
        "device_bytes": result.device.memory_bytes,
        **_bytes(held, result.overheads),
        "needed_bytes": result.needed_bytes,
        "fits": result.fits,
        "free_bytes": result.free_bytes,
        "stage": held.stage,
        "communication_bytes": result.communication,
        "flops": {"model": result.model_flops, "hardware": result.hardware_flops},
        "assumptions": list(assumptions(result)),
    }


def _bytes(held: Memory, over: Overheads) -> dict[str, Any]:
    return {
        "memory_bytes": {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": held.activations,
            "buffers": held.buffers,
            "total": held.total,
        },
        "activation_bytes": {"layers": held.layers, "logits_and_loss": held.logits},
        "buffer_bytes": {
            "bucket": held.bucket,
            "gathered": held.gathered,
            "recomputed": held.recomputed,
            "secondary": held.secondary,
        },
        "host_bytes": held.host,
        "disk_bytes": held.disk,
        "overhead_bytes": {
            "in_flight": over.in_flight,
            "gaps": over.gaps,
            "nccl": over.nccl,
            "context": over.context,
        },
    }
