"""Why tensor parallel stays inside a node: the share of a step spent communicating, by degree and wire.

One layer of a real size is recorded once per degree, on one rank of torch's fake group, on tensors without memory; a
replay puts it on t devices joined by a wire. Left out: the same by formula (`labkit.cost.tensor_parallel`), overlap, of
which a blocking all_reduce has none, attention's own products, for which torch has no FLOP formula on a CPU, and what
is not a layer (embedding, head, optimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from labkit.cost import hardware

if TYPE_CHECKING:
    from labkit.record.events import RankRecord

WIRES = ("NVLink 4", "PCIe 5", "400 GbE", "100 GbE")
DEGREES = (2, 4, 8, 16)
# Llama 3.1 8B's layer (arXiv:2407.21783, table 3), kv_heads by the largest degree so that all can be cut.
LAYER = {"hidden": 4096, "heads": 32, "kv_heads": 16, "ffn": 14336}
TOKENS = 8192


@dataclass(frozen=True)
class Share:
    """Seconds that a layer's step computes and communicates on each of t devices."""

    compute_s: float
    communicate_s: float

    @property
    def share(self) -> float:
        """Of the step, communicating."""
        return self.communicate_s / (self.compute_s + self.communicate_s)


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
