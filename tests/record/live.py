"""Training steps whose memory is compared with the cost model: six shapes, fp32 and bf16, DDP, FSDP2 and DeepSpeed's
stages, with and without recomputation; and what is measured of each in a rank.

In bf16 DDP's model has bf16 weights and the test's own masters in fp32; FSDP2 keeps its shards in fp32 and computes in
bf16; DeepSpeed does as its config says. Left out: what is expected (`tests.record.expected_memory`).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from labkit.model.llama import Llama, Shape, loss_of
from labkit.record.held import Held, held
from labkit.record.trace import Trace
from tests.record import training

SHAPES = {
    "mha": Shape(hidden=128, heads=4, kv_heads=4, ffn=344),
    "gqa": Shape(hidden=128, heads=4, kv_heads=2, ffn=344),
    "tied": Shape(hidden=128, heads=4, kv_heads=2, ffn=344, tied=True),
    "wide": Shape(hidden=96, heads=4, kv_heads=1, ffn=768),
    "vocab": Shape(vocab=1001, hidden=96, heads=4, kv_heads=2, ffn=256),
    "deep": Shape(hidden=64, layers=5, heads=4, kv_heads=2, ffn=172),
}
ENGINES = ("ddp", "fsdp2", "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3")
BUCKET = 150_000  # elements; more than the largest matrix has

CONTROL = 8  # bytes: DeepSpeed agrees on overflows in messages of 1 and 4 bytes, which are not counted


@dataclass(frozen=True)
class Case:
    """What a rank trains. batch sequences of `length` tokens each."""

    shape: str
    precision: str
    recompute: bool
    flash: bool
    batch: int
    length: int


@dataclass(frozen=True)
class Measured:
    """saved: bytes that autograd holds when forward has ended. before: bytes by kind before the model was made (engines
    of earlier cases: DeepSpeed's never go). forward, step: of forward and backward; of the step after it. moved: per
    op, bytes of whole tensors that one whole step moves.
    """

    case: Case
    saved: int
    before: dict[str, int]
    forward: Held
    step: Held
    moved: tuple[tuple[str, int], ...]


def cases() -> list[Case]:
    """Batch, length and attention in turn: each of them with each shape, precision and recomputation somewhere."""
    sizes = itertools.cycle([(4, 64), (2, 128), (3, 96), (2, 64), (8, 32)])
    found = []
    for number, (shape, precision, again) in enumerate(itertools.product(SHAPES, ("fp32", "bf16"), (False, True))):
        found.append(Case(shape, precision, again, number % 3 != 2, *next(sizes)))
    return found


def measured(engine: str, chosen: list[Case]) -> list[Measured]:
    """In a rank."""
    training.quiet()
    return [_measured(engine, case) for case in chosen]


def _measured(engine: str, case: Case) -> Measured:
    backend = SDPBackend.FLASH_ATTENTION if case.flash else SDPBackend.MATH
    gc.collect()
    with Trace() as empty:
        pass
    with sdpa_kernel(backend):
        forward, backward, step = _made(engine, case)
        for _ in range(2):
            backward(forward())
            step()
        gc.collect()
        with Trace() as first:
            loss = forward()
        backward(loss)
        step()
        del loss
        gc.collect()
        with Trace() as second:
            backward(forward())
        with Trace() as third:
            step()
    saved = held(first.record)
    moved: dict[str, int] = {}
    for each in (second.record, third.record):
        for c in each.collectives:
            if c.num_bytes <= CONTROL:
                continue
            moved[c.op] = moved.get(c.op, 0) + c.num_bytes
    both = held(second.record), held(third.record)
    autograds = saved.end["activation"] - saved.begin["activation"]
    return Measured(case, autograds, held(empty.record).begin, *both, tuple(sorted(moved.items())))


def _made(engine: str, case: Case) -> tuple[Callable, Callable, Callable]:
    """(forward, backward, step); forward makes its batch itself, so that only autograd holds it afterwards."""
    torch.manual_seed(0)
    shape = SHAPES[case.shape]
    model = Llama(shape)
    if case.recompute:
        model.layers = nn.ModuleList(map(Again, model.layers))
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = {"ddp": _ddp, "fsdp2": _fsdp2}.get(engine)
    if made:
        module, backward, step = made(model, case)
    else:
        module, backward, step = _deepspeed(model, case, int(engine[-1]))

    def forward():
        tokens = torch.randint(shape.vocab, (case.batch, case.length + 1), generator=generator)
        return loss_of(module(tokens[:, :-1].clone()), tokens[:, 1:].clone())

    return forward, backward, step


class Again(nn.Module):
    """A layer that keeps nothing but its input."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, *given):
        return checkpoint(self.layer, *given, use_reentrant=False, preserve_rng_state=False)


def _ddp(model, case):
    if case.precision == "bf16":
        model.bfloat16()
    module = nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    masters = parameters
    if case.precision == "bf16":
        masters = [p.detach().float().requires_grad_() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)

    @torch.no_grad()
    def step():
        if masters is not parameters:
            for master, p in zip(masters, parameters, strict=True):
                master.grad = p.grad.float()
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not parameters:
            for master, p in zip(masters, parameters, strict=True):
                p.copy_(master)

    return module, torch.Tensor.backward, step


def _fsdp2(model, case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if case.precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, step


def _deepspeed(model, case, stage):
    from labkit.model.deepspeed import start_deepspeed

    zero = {"stage": stage, "allgather_bucket_size": BUCKET, "reduce_bucket_size": BUCKET}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
                 "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": case.batch, "zero_optimization": zero}
    if case.precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, _ = start_deepspeed(model, config)
    return engine, engine.backward, engine.step
