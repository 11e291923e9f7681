"""Training steps that the record's tests trace: each in a rank, each built from what the course compares.

A maker gives `step()`, ready to be called; it may already have trained a step or two. Left out: what the tests
expect of each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from labkit.model.llama import Llama, Shape, loss_of

SHAPE = Shape(hidden=128, layers=2, heads=4, kv_heads=2, ffn=344)
BATCH, LENGTH = 4, 64


def quiet() -> None:
    """torch 2.13 calls names deprecated that torch 2.11 has no others for."""
    warnings.simplefilter("ignore")


def data():
    """Seeded tokens and targets, other ones on each rank; not from text, whose bytes torch does not allocate."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    while True:
        tokens = torch.randint(SHAPE.vocab, (BATCH, LENGTH + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(SHAPE)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    source = data()

    def step() -> float:
        tokens, targets = next(source)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def serial() -> Callable[[], float]:
    model = llama()
    return stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def ddp(bucket_mb: float = 25.0, views: bool = False) -> Callable[[], float]:
    model = llama()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=views)
    return stepper(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-3))


def fsdp2() -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def deepspeed(stage: int) -> Callable[[], float]:
    from labkit.model.deepspeed import start_deepspeed

    # Buckets of the model's size; the default ones would hide the model's memory behind their own.
    zero = {"stage": stage, "allgather_bucket_size": 500_000, "reduce_bucket_size": 500_000}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
                 "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero}
    engine, _ = start_deepspeed(llama(), config)
    source = data()

    def step() -> float:
        tokens, targets = next(source)
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def tensor_parallel() -> Callable[[], torch.Tensor]:
    """An MLP split by columns, then by rows; `step` gives the input's gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 384, bias=False), nn.ReLU(), nn.Linear(384, 96, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(10, 96, requires_grad=True)

    def step() -> torch.Tensor:
        model(x).pow(2).sum().backward()
        return x.grad

    return step


def ring_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """By hand: reduce-scatter, then all-gather, 2(n-1) messages to the right."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = list(torch.tensor_split(tensor, n))
    for phase, first in ((0, rank - 1), (1, rank)):
        for i in range(n - 1):
            out, into = parts[(first - i) % n], parts[(first - i - 1) % n]
            buffer = torch.empty_like(into)
            sending = dist.isend(out, (rank + 1) % n)
            dist.recv(buffer, (rank - 1) % n)
            sending.wait()
            if phase == 0:
                into += buffer
            else:
                into.copy_(buffer)
    return tensor
