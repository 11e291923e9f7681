"""Lab 07: what the judges hold to be due, worked out in another way, and what stands in for an answer.

Their verdicts on known answers are tried by tests/classroom/test_prove.py.
"""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

from labkit.labs.lab07 import design, one_f_one_b, reference, split, standins, steps, told
from labkit.ranks.launch import launch


def all_splits(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True)]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_best_split_is_the_best_of_all(stages):
    rng = random.Random(stages)
    for _ in range(12):
        layers, embedding, head = rng.randint(stages, 9), rng.randint(0, 12) / 4, rng.randint(0, 20) / 4
        times = [split.slowest(each, embedding, head) for each in all_splits(layers, stages)]
        assert split.best(layers, stages, embedding, head) == min(times)


def test_questions_tell_every_known_mistake_of_7_1_from_the_right_answer():
    questions = split.ask(random.Random(0))
    assert questions[0] == split.EXAMPLE and split.is_best([4, 5, 5, 2], *split.EXAMPLE)
    for changed, cause, _ in split._MISTAKES:
        answers = [next(s for s in all_splits(q[0], q[1]) if split.is_best(s, q[0], q[1], *changed(*q[2:])))
                   for q in questions if q[0] <= 16]  # fmt: skip
        small = [q for q in questions if q[0] <= 16]
        assert not all(split.is_best(a, *q) for q, a in zip(small, answers, strict=True)), cause


def test_microbatches_in_flight_are_forwards_without_their_backward():
    assert one_f_one_b.in_flight("F0 F1 B0 F2 B1 B2".split()) == 2
    assert one_f_one_b.in_flight(["F0", "B0"] * 3) == 1
    assert one_f_one_b.in_flight([]) == 0


def test_the_serial_run_is_the_mean_over_microbatches_as_torch_has_it():
    case = steps.draw(random.Random(1), "gpipe", 2, 3)
    losses, parts = steps.serial(case)
    weights = [w.clone().requires_grad_() for own in case.weights for w in own]
    x = torch.cat(case.inputs)
    for weight in weights:
        x = torch.tanh(F.linear(x, weight))
    loss = F.mse_loss(x, torch.cat(case.targets))
    loss.backward()
    assert sum(losses) / 3 == pytest.approx(float(loss.detach()), rel=1e-5)
    due = [sum(part[rank][k] for part in parts) / 3 for rank in range(2) for k in range(2)]
    assert all(torch.allclose(a, w.grad, atol=1e-6) for a, w in zip(due, weights, strict=True))
    assert told.theory(case) == 1 / 4


def test_a_stage_notes_forwards_and_backwards_as_they_come():
    stage = steps.Stage([torch.eye(4)])
    x = torch.ones(2, 4, requires_grad=True)
    first, second = stage(x), stage(x)
    second.sum().backward()
    torch.autograd.grad(first.sum(), x)
    with torch.no_grad():
        stage(x)
    assert stage.notes == ["F0", "F1", "B1", "B0", "F2"]


def stand_ins(weights, inputs, targets, shape):
    found = []
    for fn in (standins.gpipe, standins.one_f_one_b):
        stage = steps.Stage(weights)
        loss = fn(stage, inputs, targets, shape)
        found.append((loss, [weight.grad for weight in stage.weights], stage.notes))
    tied = torch.nn.Parameter(torch.zeros(3))
    tied.grad = torch.ones(3)
    reference.sum_by_labkit(tied)
    return found, tied.grad


def test_what_stands_in_for_an_answer_is_right():
    case = steps.draw(random.Random(2), "gpipe", 2, 4)
    preload = ("labkit.labs.lab07.reference", "labkit.model.pipeline")
    by_rank = launch(stand_ins, 2, rank_args=case.rank_args, prints="quiet", preload=preload)
    losses, parts = steps.serial(case)
    for rank, (found, tied) in enumerate(by_rank):
        assert tied.tolist() == [2, 2, 2]
        for (loss, gradients, notes), most in zip(found, (4, 2 - rank), strict=True):
            due = [sum(part[rank][k] for part in parts) / 4 for k in range(2)]
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, due, strict=True))
            assert one_f_one_b.in_flight(notes) == most
            assert loss is None if rank == 0 else loss == pytest.approx(sum(losses) / 4)
    assert design._bad((4, 8), design._read((4, 8), reference.zb_h1_text(4, 8))[0]) is None
    assert sum(reference.even_stages(*split.EXAMPLE)) == split.EXAMPLE[0]
