"""Ten steps on real text through a pipeline: losses, weights and input gradients are the serial run's.

By labkit's executor, and by the solutions of 7.2, 7.3 and 7.4 that stand in the solved notebook. By default a sample;
every schedule and number of ranks with --soak. Left out: a step's gradients alone, and its idle share (test_pipeline).
"""

import functools
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.labs.lab07 import engines
from labkit.model.llama import Llama, loss_of
from labkit.model.pipeline import run
from labkit.model.stages import EMBEDDING, holders, named, stages_of, sum_shared
from labkit.model.text import batches
from labkit.ranks.launch import launch
from tests.model import piped
from tests.schedule.made import made

STEPS, MICROBATCHES, RATE = 10, 4, 0.1
BATCH, LENGTH = 2, 32
PRELOAD = ("labkit.model.pipeline", "labkit.model.stages")


def whole(shape):
    torch.manual_seed(0)
    return Llama(shape)


def data():
    """Per step its microbatches."""
    flow = list(batches(BATCH, LENGTH, seed=5, steps=STEPS * MICROBATCHES))
    return [flow[i : i + MICROBATCHES] for i in range(0, len(flow), MICROBATCHES)]


def noting(enter, found):
    """`enter` that appends the gradient of what it gives to found, as backwards come."""

    def noted(tokens):
        x = enter(tokens)
        x.register_hook(lambda gradient: found.append(gradient.clone()))
        return x

    return noted


@functools.cache
def serial(shape):
    """(losses, {name: weight}, input gradients by step and microbatch)."""
    model, losses, inputs = whole(shape), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.embed_tokens.register_forward_hook(
        lambda module, given, x: x.register_hook(lambda gradient: inputs.append(gradient.clone())) and None
    )
    for pairs in data():
        optimizer.zero_grad()
        total = 0.0
        for tokens, targets in pairs:
            loss = loss_of(model(tokens), targets) / MICROBATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, {name: each.detach() for name, each in model.named_parameters()}, inputs


def by_schedule(schedule, shape):
    """(losses, weights, input gradients) of this rank."""
    stages = stages_of(whole(shape), schedule, dist.get_rank())
    parameters, owners, losses, inputs = named(stages, shape.tied), holders(shape, schedule), [], []
    for stage in stages.values():
        stage.enter = noting(stage.enter, inputs)
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for pairs in data():
        optimizer.zero_grad()
        losses.append(run(schedule, stages, pairs, loss_of, (BATCH, LENGTH, shape.hidden)))
        sum_shared(parameters, owners)
        optimizer.step()
    return losses, {name: each.detach() for name, each in parameters.items()}, inputs


def by_answer(step, share, shape):
    """The same by a learner's step, and for a tied model what they share the weight's gradient with."""
    rank, ranks, losses, inputs = dist.get_rank(), dist.get_world_size(), [], []
    stage = engines.stage_of(whole(shape), rank, ranks)
    stage.enter = noting(stage.enter, inputs)
    parameters = named({rank: stage}, shape.tied)
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    for pairs in data():
        optimizer.zero_grad()
        given = [tokens if rank == 0 else None for tokens, _ in pairs]
        targets = [target if rank == ranks - 1 else None for _, target in pairs]
        losses.append(step(stage, given, targets, (BATCH, LENGTH, shape.hidden), loss_of))
        if shape.tied:
            share(parameters.get(EMBEDDING))
        optimizer.step()
    losses = [None if loss is None or rank < ranks - 1 else float(loss) for loss in losses]
    return losses, {name: each.detach() for name, each in parameters.items()}, inputs


def off(a, b):
    return float((a - b).abs().max() / b.abs().max())


def assert_equals_serial(by_rank, shape):
    due_losses, due_weights, due_inputs = serial(shape)
    assert due_losses[-1] < 0.95 * due_losses[0], "losses fall on real text"
    losses, weights, inputs = zip(*by_rank, strict=True)
    got = [sum(each for each in of_step if each is not None) for of_step in zip(*losses, strict=True)]
    seen = {"losses": off(torch.tensor(got), torch.tensor(due_losses))}
    assert set().union(*weights) == set(due_weights), "every parameter is somewhere"
    seen["weights"] = max(off(each, due_weights[name]) for own in weights for name, each in own.items())
    came = [gradient for own in inputs for gradient in own]
    assert len(came) == STEPS * MICROBATCHES
    seen["input gradients"] = max(map(off, came, due_inputs))
    print(", ".join(f"{what} {most:.1e}" for what, most in seen.items()))
    assert max(seen.values()) <= 1e-5


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize("p", [2, 4])
def test_ten_steps_of_every_schedule_equal_serial(name, p, soak):
    if not soak and (name, p) not in (("1f1b", 2), ("zb_h1", 4), ("gpipe", 2), ("1f1b", 4)):
        pytest.skip("a sample; --soak has all")
    shape = piped.shape(p, tied=p == 4)
    schedule = made(name, p, MICROBATCHES)
    by_rank = launch(by_schedule, p, schedule, shape, prints="quiet", preload=PRELOAD, deadline_s=240)
    assert_equals_serial(by_rank, shape)


def solutions():
    """The functions that the solved notebook defines as answers."""
    path = Path(__file__).parents[2] / "notebooks" / "solved" / "07_pipeline_parallel.ipynb"
    cells = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    found = {"torch": torch, "dist": dist, "F": F, "__name__": "solved_07"}
    for exercise in ("exercise-7-2", "exercise-7-3", "exercise-7-4"):
        exec(cells[exercise], found)
    return found


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize("p", [2, 4])
def test_ten_steps_by_a_solution_equal_serial(name, p, soak):
    if not soak and (name, p) not in (("gpipe", 2), ("one_f_one_b", 4)):
        pytest.skip("a sample; --soak has all")
    shape, solved = piped.shape(p, tied=p == 4), solutions()
    answers = solved[name], solved["sum_tied"]
    by_rank = launch(by_answer, p, *answers, shape, prints="quiet", preload=PRELOAD, deadline_s=240)
    assert_equals_serial(by_rank, shape)
