"""Why tensor parallel stays inside a node: the share of a step spent communicating, by degree and wire.

One layer of a real size is recorded once per degree, on one rank of torch's fake group, on tensors without memory; a
replay puts it on t devices joined by a wire. `share` is the same by formula, quick enough for an explorer. Left out:
overlap, of which a blocking all_reduce has none, attention's own products, for which torch has no FLOP formula on a
CPU, and what is not a layer (embedding, head, optimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from labkit.cost import comm, hardware
from labkit.cost.groups import on_link
from labkit.cost.parts import Link

if TYPE_CHECKING:
    from labkit.record.events import RankRecord

WIRES = ("NVLink 4", "PCIe 5", "400 GbE", "100 GbE")
DEGREES = (2, 4, 8, 16)
# Llama 3.1 8B's layer (arXiv:2407.21783, table 3), kv_heads by the largest degree so that all can be cut.
LAYER = {"hidden": 4096, "heads": 32, "kv_heads": 16, "ffn": 14336}
TOKENS = 8192
ALL_REDUCES = 4  # in a layer's step: two forward, two backward
# Bytes per token and hidden element that a device moves in LAYER's recorded step beside products: those that t ranks
# share, and those that every rank moves whole (norms, residuals, copies for all_reduce).
CUT_BYTES, WHOLE_BYTES = 174.0, 336.5


@dataclass(frozen=True)
class Share:
    """Seconds that a layer's step computes and communicates on each of t devices."""

    compute_s: float
    communicate_s: float

    @property
    def share(self) -> float:
        """Of the step, communicating."""
        return self.communicate_s / (self.compute_s + self.communicate_s)


def share(hidden: int, tokens: int, tp: int, link: str | Link, device: str = "H100", dtype: str = "bf16") -> Share:
    """A Llama layer's step by formula: products cut by tp, elementwise work cut and whole, 4 all_reduces of tokens *
    hidden.

    A layer is LAYER, scaled to this hidden size: 6 FLOPs per weight and token in forward and backward. Bytes of eager,
    unfused elementwise work are those of LAYER's record (CUT_BYTES, WHOLE_BYTES). tokens: batch times sequence. Raises
    ValueError for names that are not known, and for sizes below 1.
    """
    if min(hidden, tokens, tp) < 1:
        raise ValueError(f"hidden {hidden}, tokens {tokens} and tp {tp} must be 1 or more")
    chip = hardware.device(device)
    weights = 2 + 2 * LAYER["kv_heads"] / LAYER["heads"] + 3 * LAYER["ffn"] / LAYER["hidden"]
    products_s = 6 * weights * hidden**2 * tokens / tp / chip.peak(dtype)
    moved_s = (CUT_BYTES / tp + WHOLE_BYTES) * hidden * tokens / chip.memory_bandwidth
    if tp == 1:
        return Share(products_s + moved_s, 0.0)
    group = on_link(tp, hardware.link(link))
    return Share(products_s + moved_s, ALL_REDUCES * comm.group_time_s("all_reduce", 2 * tokens * hidden, group))


def shares(
    degrees: Sequence[int] = DEGREES, wires: Sequence[str] = WIRES, device: str = "H100"
) -> dict[str, list[float]]:
    """Per wire, by degree: the share of a layer's forward and backward that a replay of its record spends
    communicating.

    Raises ValueError for a degree that does not divide the layer's heads, and for names that are not known;
    RuntimeError where a process group exists.
    """
    found: dict[str, list[float]] = {wire: [] for wire in wires}
    for degree in degrees:
        record = layer_record(degree)
        for wire in wires:
            found[wire].append(replayed(record, degree, wire, device).share)
    return found


def replayed(record: RankRecord, degree: int, wire: str, device: str = "H100") -> Share:
    """A recorded layer, every rank's alike, on `degree` devices all joined by one wire."""
    from labkit.record.prices import prices
    from labkit.record.replay import replay

    cluster = hardware.cluster(device, per_node=degree, intra=wire)
    records = [replace(record, rank=rank) for rank in range(degree)]
    played = replay(records, prices(cluster, "bf16"))
    waiting = played.exposed_s(0)
    return Share(played.time_s - waiting, waiting)


def layer_record(degree: int) -> RankRecord:
    """One layer's forward and backward in bf16 as rank 0 of `degree` records it: LAYER's sizes, TOKENS tokens."""
    import gc

    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    from labkit.record.trace import Trace

    if LAYER["kv_heads"] % degree:
        raise ValueError(f"a degree divides the layer's {LAYER['kv_heads']} KV heads; {degree} does not, 8 would do")
    if dist.is_initialized():
        raise RuntimeError("a process group is there already; a fake one needs a process without: a notebook, a script")
    gc.collect()
    dist.init_process_group("fake", rank=0, world_size=degree)
    try:
        with FakeTensorMode():
            layer, (cos, sin) = _layer(degree)
            x = torch.zeros(1, TOKENS, LAYER["hidden"], dtype=torch.bfloat16, requires_grad=True)
            with Trace(fake=True) as trace:
                layer(x, cos, sin).sum().backward()
        return trace.record
    finally:
        dist.destroy_process_group()


def _layer(degree: int) -> tuple[Any, tuple[Any, Any]]:
    """(a layer of a rank's sizes, summed where ranks are, its rotary angles)."""
    import torch

    import labkit.labs.lab06.plain_layer as plain_layer
    from labkit.model.llama import rotary

    torch.set_default_dtype(torch.bfloat16)  # fakes cannot be converted in place
    try:
        layer = plain_layer.PlainLayer(degree, **LAYER)
    finally:
        torch.set_default_dtype(torch.float32)
    return layer, rotary(TOKENS, LAYER["hidden"] // LAYER["heads"], 500_000.0)
