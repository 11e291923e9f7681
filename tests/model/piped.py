"""What ranks do in the tests of the pipeline: gradients of a Llama cut into stages, and steps that are recorded."""

import torch
import torch.distributed as dist
from torch import nn

from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.pipeline import run
from labkit.model.stages import holders, named, stages_of, sum_shared
from labkit.model.text import batches
from labkit.record.trace import Trace

BATCH, LENGTH = 2, 6


def whole(shape):
    torch.manual_seed(0)
    model = Llama(shape)
    for parameter in model.parameters():  # far from its start, where many gradients are tiny
        nn.init.normal_(parameter, std=0.2)
    return model


def data(microbatches):
    return list(batches(BATCH, LENGTH, seed=3, steps=microbatches))


def serial(shape, microbatches):
    """(loss, {name: gradient}) of the whole model in one process."""
    model = whole(shape)
    total = 0.0
    for tokens, targets in data(microbatches):
        loss = loss_of(model(tokens), targets) / microbatches
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def pipelined(schedules, shapes):
    """Per schedule (loss, {name: gradient}) of this rank's parameters, gradients of shared ones summed."""
    found = []
    for schedule, shape in zip(schedules, shapes, strict=True):
        stages = stages_of(whole(shape), schedule, dist.get_rank())
        hidden = (BATCH, LENGTH, shape.hidden)
        loss = run(schedule, stages, data(schedule.microbatches), loss_of, hidden)
        parameters = named(stages, shape.tied)
        sum_shared(parameters, holders(shape, schedule))
        found.append((loss, {name: parameter.grad for name, parameter in parameters.items()}))
    return found


# Steps that are recorded: stages of equal work, whose other ops take hardly any time.

WIDTH, ROWS, LAYERS = 128, 32, 2


def equal_stage(layers=LAYERS):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])


def weighted(output, target):
    return (output * target).sum()


def recorded(schedules):
    """A record per schedule."""
    found = []
    for schedule in schedules:
        torch.manual_seed(0)
        stages = {stage: equal_stage() for stage in schedule.stages_of(dist.get_rank())}
        pairs = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(schedule.microbatches)]
        with Trace() as t:
            run(schedule, stages, pairs, weighted, (ROWS, WIDTH))
        found.append(t.record)
    return found


def recorded_by_torch(asked):
    """A record per (name of a schedule of torch.distributed.pipelining, microbatches), of a step after one to warm
    up."""
    from torch.distributed import pipelining

    found, rank, p = [], dist.get_rank(), dist.get_world_size()
    places = {"single": (rank,), "looped": (rank, p + rank), "v": (rank, 2 * p - 1 - rank)}
    for name, style, m in asked:
        own = places[style]
        count = p if style == "single" else 2 * p
        stages = [pipelining.PipelineStage(equal_stage(), stage, count, torch.device("cpu")) for stage in own]
        kind = getattr(pipelining.schedules, name)
        made = kind(stages[0] if style == "single" else stages, m, loss_fn=weighted)
        x = torch.randn(ROWS * m, WIDTH, requires_grad=True)
        given = (x,) if 0 in own else ()
        target = torch.randn(ROWS * m, WIDTH) if count - 1 in own else None
        made.step(*given, target=target)
        with Trace() as t:
            made.step(*given, target=target)
        found.append(t.record)
    return found


def shape(p, tied=False, over=0):
    """A Llama of two layers a rank, and `over` more."""
    return Shape(vocab=256, hidden=16, layers=2 * p + over, heads=2, kv_heads=1, ffn=24, tied=tied)
