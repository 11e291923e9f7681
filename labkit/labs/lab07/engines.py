"""The small Llama trained through a pipeline by anyone: in one process, by a learner's step, by torch, by DeepSpeed.

All see the same batches and AdamW, so losses are equal. Every rank makes the whole model from one seed and keeps its
stage: small models can afford it. Left out: drawing, and pipelines beside data parallel ranks (lab 08).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

from labkit.model.llama import Shape

if TYPE_CHECKING:
    import torch

    from labkit.record.events import RankRecord
    from labkit.schedule.actions import Schedule

MODEL = Shape(hidden=64, layers=4, heads=4, kv_heads=2, ffn=172)
TIED = Shape(hidden=64, layers=4, heads=4, kv_heads=2, ffn=172, tied=True)
BATCH, LENGTH = 2, 64  # windows of a microbatch, and their bytes
RATE = 3e-3
PRELOAD = ("labkit.model.pipeline", "labkit.model.stages", "labkit.record.trace", "torch.distributed.pipelining")
# A step of a pipeline: (stage, inputs, targets, shape, loss_fn) to the mean loss on the last rank.
Step = Callable[..., Any]


@dataclass(frozen=True)
class Trained:
    """losses: of each step. kept: per rank, parameters. tied: per rank that has it, the tied weight after the last."""

    losses: tuple[float, ...]
    kept: tuple[int, ...]
    tied: tuple[Any, ...] = ()


def whole(shape: Shape = MODEL) -> torch.nn.Module:
    """The model, from seed 0."""
    import torch

    from labkit.model.llama import Llama

    torch.manual_seed(0)
    return Llama(shape)


def data(microbatches: int, steps: int, device: Any = "cpu") -> Iterator[list[tuple]]:
    """Per step the microbatches (tokens, targets), each (BATCH, LENGTH), on a device."""
    from labkit.model.text import batches

    flow = batches(BATCH, LENGTH, seed=7, steps=steps * microbatches)
    for _ in range(steps):
        yield [tuple(each.to(device) for each in next(flow)) for _ in range(microbatches)]


def stage_of(model: torch.nn.Module, rank: int, ranks: int) -> torch.nn.Module:
    """A rank's stage as a plain module: the first takes tokens, the last gives logits, hidden states go between."""
    from labkit.model.stages import LlamaStage

    class Stage(LlamaStage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.is_floating_point() else self.enter(x))

    return Stage(model, rank, ranks)


def serial(microbatches: int, steps: int, shape: Shape = MODEL) -> Trained:
    """Trained whole, in this process, by the same microbatches."""
    import torch

    from labkit.model.llama import loss_of

    model = whole(shape)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=RATE), []
    for pairs in data(microbatches, steps):
        optimizer.zero_grad()
        total = 0.0
        for tokens, targets in pairs:
            loss = loss_of(model(tokens), targets) / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return Trained(tuple(losses), (sum(each.numel() for each in model.parameters()),))


def train(step: Step, ranks: int, microbatches: int, steps: int, share: Callable | None = None) -> Trained:
    """Trained on ranks by `step`. share: for a tied model, what every rank calls after backward with the tied weight,
    None between the ends; without it no weight is tied. Raises RankFailed as `launch`."""
    from labkit.ranks.launch import launch

    found = launch(_trained, ranks, step, microbatches, steps, share, prints="quiet", preload=PRELOAD)
    losses, kept, weights = zip(*found, strict=True)
    return Trained(tuple(losses[-1]), kept, tuple(each for each in weights if each is not None))


def _trained(step: Step, microbatches: int, steps: int, share: Callable | None) -> tuple:
    import torch
    import torch.distributed as dist

    from labkit.model.llama import loss_of
    from labkit.model.stages import EMBEDDING, HEAD
    from labkit.ranks.rank import device

    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), []
    stage = stage_of(whole(TIED if share is not None else MODEL), rank, ranks).to(device())
    named = dict(stage.named_parameters())
    weight = named.get(EMBEDDING, named.get(HEAD)) if share is not None else None
    optimizer = torch.optim.AdamW(stage.parameters(), lr=RATE)
    for pairs in data(microbatches, steps, device()):
        optimizer.zero_grad()
        inputs = [tokens if rank == 0 else None for tokens, _ in pairs]
        targets = [target if rank == ranks - 1 else None for _, target in pairs]
        losses.append(step(stage, inputs, targets, (BATCH, LENGTH, MODEL.hidden), loss_of))
        if share is not None:
            share(weight)
        optimizer.step()
    kept = sum(each.numel() for each in stage.parameters())
    losses = [float(loss) for loss in losses] if rank == ranks - 1 else []
    return losses, kept, None if weight is None else weight.detach().cpu().clone()


def scheduled(schedule: Schedule, steps: int) -> Trained:
    """Trained by labkit's executor with any schedule. Raises ValueError, as RankFailed, for one that is not valid."""
    from labkit.ranks.launch import launch

    shape = _shape_for(schedule)
    found = launch(_scheduled, schedule.ranks, schedule, steps, shape, prints="quiet", preload=PRELOAD)
    losses, kept = zip(*found, strict=True)
    summed = [sum(each for each in of_step if each is not None) for of_step in zip(*losses, strict=True)]
    return Trained(tuple(summed), kept)


def executed(schedule: Schedule, steps: int = 3) -> str:
    """Train by a schedule and whole, and say in a sentence how far apart the losses are. RuntimeError where they are
    not equal."""
    found = scheduled(schedule, steps)
    due = serial(schedule.microbatches, steps, _shape_for(schedule))
    off = max(abs(a - b) for a, b in zip(found.losses, due.losses, strict=True))
    said = f"run on {schedule.ranks} ranks, {steps} steps: losses within {off:.0e} of the serial run's"
    if off > 1e-4:
        raise RuntimeError(f"{said}, which is too much: report it, the schedule is valid")
    return said


def _shape_for(schedule: Schedule) -> Shape:
    """A layer or more for each stage."""
    return replace(MODEL, layers=max(MODEL.layers, schedule.num_stages))


def _scheduled(schedule: Schedule, steps: int, shape: Shape) -> tuple:
    import torch
    import torch.distributed as dist

    from labkit.model.llama import loss_of
    from labkit.model.pipeline import run
    from labkit.model.stages import holders, named, stages_of, sum_shared
    from labkit.ranks.rank import device

    stages = stages_of(whole(shape).to(device()), schedule, dist.get_rank())
    parameters, owners = named(stages), holders(shape, schedule)
    optimizer, losses = torch.optim.AdamW(parameters.values(), lr=RATE), []
    for pairs in data(schedule.microbatches, steps, device()):
        optimizer.zero_grad()
        losses.append(run(schedule, stages, pairs, loss_of, (BATCH, LENGTH, shape.hidden)))
        sum_shared(parameters, owners)
        optimizer.step()
    return losses, sum(each.numel() for each in parameters.values())


def by_torch(name: str, ranks: int, microbatches: int, steps: int) -> Trained:
    """Trained by torch.distributed.pipelining. name: "ScheduleGPipe", "Schedule1F1B"."""
    return train(_TorchStep(name), ranks, microbatches, steps)


class _TorchStep:
    """The face of 7.2, by torch; the stage and the schedule are made at the first step."""

    def __init__(self, name: str):
        self.name, self.made = name, None

    def __call__(self, stage: Any, inputs: Sequence, targets: Sequence, shape: Sequence[int], loss_fn: Any) -> Any:
        import torch
        import torch.distributed as dist
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        if self.made is None:
            piece = pipelining.PipelineStage(stage, rank, ranks, next(stage.parameters()).device)
            self.made = getattr(pipelining, self.name)(piece, len(inputs), loss_fn=loss_fn)
        losses: list[torch.Tensor] = []
        given = (torch.cat(list(inputs)),) if rank == 0 else ()
        target = torch.cat(list(targets)) if rank == ranks - 1 else None
        self.made.step(*given, target=target, losses=losses)
        return float(torch.stack(losses).mean().detach()) if losses else None


def by_deepspeed(ranks: int, microbatches: int, steps: int) -> Trained:
    """Trained by DeepSpeed's PipelineModule, whose schedule is 1F1B. Raises DeepSpeedMissing, as RankFailed."""
    from labkit.ranks.launch import launch

    preload = ("deepspeed", *PRELOAD)
    found = launch(_by_deepspeed, ranks, microbatches, steps, prints="quiet", preload=preload, deadline_s=120.0)
    return Trained(tuple(found[-1][0]), tuple(kept for _, kept in found))


def _by_deepspeed(microbatches: int, steps: int) -> tuple:
    import torch
    import torch.distributed as dist

    from labkit.model.deepspeed import connect, start_deepspeed
    from labkit.model.llama import loss_of

    deepspeed, ranks = connect(), dist.get_world_size()
    layers = [stage_of(whole(), rank, ranks) for rank in range(ranks)]
    settings = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": microbatches}
    with contextlib.redirect_stdout(None):
        module = deepspeed.pipe.PipelineModule(layers, num_stages=ranks, loss_fn=loss_of, partition_method="uniform")
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        engine, _ = start_deepspeed(module, settings, optimizer)
        losses = [float(engine.train_batch(iter(pairs))) for pairs in data(microbatches, steps)]
    return losses, sum(each.numel() for each in module.parameters())


def refusal(stage: int) -> str:
    """What DeepSpeed says to a PipelineModule with that ZeRO stage; "" when it takes it. Raises DeepSpeedMissing."""
    from labkit.ranks.launch import run_ranks

    preload = ("deepspeed", *PRELOAD)
    outcome = run_ranks(_zero_with_pipeline, 2, stage, prints="quiet", preload=preload, deadline_s=120.0)
    return "" if outcome.cause is None else outcome.cause.sentence


def _zero_with_pipeline(stage: int) -> None:
    import torch

    from labkit.model.deepspeed import connect, start_deepspeed

    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    with contextlib.redirect_stdout(None):
        module = connect().pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        start_deepspeed(module, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}})


def timed(step: Step, ranks: int, many: Sequence[int], width: int = 512, rows: int = 128) -> tuple[float, list[float]]:
    """(seconds of a stage's own forward and backward of one microbatch, all ranks busy; of a step for each number of
    microbatches), medians of five, the slowest rank."""
    from labkit.ranks.launch import launch

    found = launch(_timed, ranks, step, tuple(many), width, rows, prints="quiet", preload=PRELOAD)
    alone, steps = zip(*found, strict=True)
    return max(alone), [max(each) for each in zip(*steps, strict=True)]


def _timed(
    step: Step, many: tuple[int, ...], width: int, rows: int, now_s: Callable[[], float] = monotonic
) -> tuple[float, list[float]]:
    import torch
    import torch.distributed as dist

    stage = _equal_stage(width)
    place = next(stage.parameters()).device
    x, due = torch.randn(rows, width, device=place, requires_grad=True), torch.randn(rows, width, device=place)

    def median_s(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            dist.barrier()
            began_s = now_s()
            call()
            if place.type == "cuda":
                torch.cuda.synchronize(place)  # a kernel's launch is not its end
            times.append(now_s() - began_s)
        return median(times[1:])

    alone = median_s(lambda: stage(x).backward(due))
    return alone, [median_s(lambda m=m: step(*_given(stage, m, width, rows))) for m in many]


def recorded(step: Step, ranks: int, microbatches: int, width: int = 128, rows: int = 32) -> tuple[RankRecord, ...]:
    """A step over equal stages of two Linear layers, recorded on every rank, after one to warm up."""
    from labkit.ranks.launch import launch

    return tuple(launch(_recorded, ranks, step, microbatches, width, rows, prints="quiet", preload=PRELOAD))


def _recorded(step: Step, microbatches: int, width: int, rows: int) -> Any:
    from labkit.record.trace import Trace

    stage = _equal_stage(width)
    step(*_given(stage, microbatches, width, rows))
    arguments = _given(stage, microbatches, width, rows)
    with Trace() as trace:
        step(*arguments)
    return trace.record


def _equal_stage(width: int) -> torch.nn.Module:
    """Two Linear layers, this rank's own numbers."""
    import torch
    import torch.distributed as dist

    from labkit.ranks.rank import device

    torch.manual_seed(dist.get_rank())
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(2)]).to(device())


def _given(stage: torch.nn.Module, microbatches: int, width: int, rows: int) -> tuple:
    """Arguments of a step. Inputs require grad, so that the first stage does the same work as all others."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    rank, ranks, place = dist.get_rank(), dist.get_world_size(), next(stage.parameters()).device
    many, size = range(microbatches), (rows, width)
    inputs = [torch.randn(size, device=place, requires_grad=True) if rank == 0 else None for _ in many]
    targets = [torch.randn(size, device=place) if rank == ranks - 1 else None for _ in many]
    return stage, inputs, targets, (rows, width), F.mse_loss
