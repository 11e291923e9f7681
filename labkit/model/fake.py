"""A training step of a model that no machine here could hold, recorded: FSDP2 among fake ranks, tensors without memory.

torch's fake process group has any number of ranks and answers every collective at once; in a FakeTensorMode a tensor
has a shape, but no numbers. So one process records what one of 64 ranks would hold and send. Left out: values and
time, of which there are none, and what a GPU's kernels would take besides.
"""

from __future__ import annotations

import dataclasses
import gc

import torch
import torch.distributed as dist

from labkit.cost import shapes
from labkit.model.llama import Llama, Shape, loss_of
from labkit.record.events import RankRecord
from labkit.record.trace import Trace


def llama_shape(shape: shapes.Shape, layers: int | None = None) -> Shape:
    """A shape of `labkit.cost` (by name: `labkit.cost.named`) as our Llama; `layers` in place of its own number.

    Raises ValueError for a model that is no plain Llama.
    """
    if odd := shapes.beyond_plain_llama(shape):
        raise ValueError(f"{shape.name} is no plain Llama: it has {', '.join(odd)}; Llama 3.1 70B would do")
    same = {f.name for f in dataclasses.fields(Shape)} & {f.name for f in dataclasses.fields(shapes.Shape)}
    sizes = {name: getattr(shape, name) for name in same}
    return Shape(**(sizes | {"layers": layers or shape.layers}))


def fake_fsdp_record(shape: Shape, world_size: int, batch: int = 1, length: int = 2048) -> RankRecord:
    """The record of rank 0 of `world_size` in one training step in fp32: FSDP2 layer by layer, AdamW, states there.

    batch: sequences of `length` tokens on this rank. What else this process holds does not count. Raises RuntimeError
    where a process group exists: a fake one needs its place.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group is there already; a fake one needs a process without: a notebook, a script")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    gc.collect()  # fakes of an earlier call would be counted
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        mesh = init_device_mesh("cpu", (world_size,))  # reads its ranks' numbers, so not from fakes
        with FakeTensorMode():
            model, optimizer = _sharded(shape, mesh)
            tokens = torch.zeros(batch, length + 1, dtype=torch.long)
            with Trace(fake=True) as trace:
                loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()
        return trace.record
    finally:
        dist.destroy_process_group()


def _sharded(shape: Shape, mesh) -> tuple[Llama, torch.optim.Optimizer]:
    """Model and optimizer, its moments made by a step on gradients of 0."""
    from torch.distributed.fsdp import fully_shard

    model = Llama(shape)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
