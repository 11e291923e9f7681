"""Problems with tensor parallel that people reported: what ranks, checks and arithmetic here say of the whole kind.

The reports with their sources are in tests/data/reported_problems.json. Left out: kernels' own times, which are not
known of the machines reported on.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.classroom import prove
from labkit.cost import hardware, tensor_parallel
from labkit.cost.groups import on_link
from labkit.labs import lab06
from labkit.ranks.launch import launch
from tests.problems import problem

FILE = Path(__file__).parents[1] / "mistakes" / "lab06.py"


def row_parallel_bias(place):
    """(whether the output is right, the bias's gradient over the right one) of a row-parallel product on this rank.

    place: how a rank adds the bias to its part before the sum."""
    t, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    due = F.linear(x, weight, bias)
    own = bias.clone().requires_grad_()
    out = F.linear(x.chunk(t, 1)[rank], weight.chunk(t, 1)[rank])
    out = out + {"shared": own / t, "all": own, "first": own * (rank == 0)}[place]
    total = out.detach().clone()
    dist.all_reduce(total)
    out.backward(torch.ones_like(out))
    return bool(torch.allclose(total, due, atol=1e-5)), float(own.grad[0]) / len(x)


@pytest.mark.parametrize("t", [2, 4])
def test_a_bias_before_the_sum_is_wrong_forward_or_backward_whatever_is_done(t):
    """Shared out: right output, 1/t of the gradient. On all: wrong output. On one: no gradient elsewhere."""
    report = problem("D04")
    shared = launch(row_parallel_bias, t, "shared", prints="quiet")
    assert shared == [(True, pytest.approx(1 / t))] * t
    assert t != report["input"]["tp"] or "0.5 of reference" in report["observed"]
    assert launch(row_parallel_bias, t, "all", prints="quiet") == [(False, 1.0)] * t
    assert launch(row_parallel_bias, t, "first", prints="quiet") == [(True, 1.0)] + [(True, 0.0)] * (t - 1)


def verdict(exercise, name):
    asked = next(each for each in lab06.EXERCISES if each.id == exercise)
    row = next(row for row in prove.rows((asked,), prove.load(FILE)) if row.name == name)
    return prove.judge(row, FILE, 7)


def test_a_bias_that_is_shared_out_is_told_by_its_gradient():
    found = verdict("6.1b", "BiasSharedOut")
    assert found.cause == "bias_shared_out" and "right forward" in found.sentence and "1/t" in found.sentence


def gathered_features(differentiable):
    """Gradient of a weight, averaged over ranks as DDP does, over that of all features in one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole, start = torch.randn(4 * world, 3), torch.randn(3, 3)

    def loss_of(features):
        return (features @ features.t()).square().mean()

    reference = start.clone().requires_grad_()
    loss_of(whole @ reference).backward()
    weight = start.clone().requires_grad_()
    own = whole.chunk(world)[rank] @ weight
    if differentiable:
        import labkit.labs.lab06.standins as standins

        features = standins.gather(own[None], dist.group.WORLD)[0]
    else:
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.detach())
        parts[rank] = own
        features = torch.cat(parts)
    loss_of(features).backward()
    dist.all_reduce(weight.grad)
    ratios = weight.grad / world / reference.grad
    return float(ratios.mean()), float((ratios - ratios.mean()).abs().max())


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_gathered_by_all_gather_sends_no_gradient_back(world):
    """One's own part alone is alive: the mean over ranks is 1/W of the gradient. A gather whose backward sums and
    scatters has all of it."""
    report = problem("D15")
    dead = launch(gathered_features, world, False, prints="quiet")
    assert dead == [(pytest.approx(1 / world, rel=1e-4), pytest.approx(0, abs=1e-3))] * world
    observed = [int(each) for each in report["observed"].split("(")[1].rstrip(")").split(" vs ")]
    assert world != report["input"]["ranks"] or dead[0][0] == pytest.approx(observed[0] / observed[1], rel=1e-4)
    alive = launch(gathered_features, world, True, prints="quiet", preload=("labkit.labs.lab06.standins",))
    assert alive == [(pytest.approx(1, rel=1e-4), pytest.approx(0, abs=1e-3))] * world


def test_a_gather_that_sums_no_gradients_is_told_so():
    assert verdict("6.5", "NoReduceBackward").cause == "no_reduce_backward"


def times(hidden, tokens, wire, ranks, device="H100"):
    shape, seq = tensor_parallel.llama_like(hidden), min(tokens, 2048)
    group = on_link(ranks, wire if not isinstance(wire, str) else hardware.link(wire))
    return tensor_parallel.layer_time(shape, tokens, seq, hardware.device(device), group)


def test_two_cards_on_pcie_are_slower_than_one_for_a_small_model():
    """The kind of the report: a hidden size of some 2,000. NVLink, or a layer of 8,192, turns it round."""
    measured = problem("F03")["input"]["measured_ms"]
    assert measured["tp2"] > measured["tp1"]
    for tokens in (128, 2048, 16384):
        assert times(2048, tokens, "PCIe 4", 2).time_s > times(2048, tokens, "PCIe 4", 1).time_s
        assert times(2048, tokens, "NVLink 4", 2).time_s < times(2048, tokens, "NVLink 4", 1).time_s
        assert times(8192, tokens, "PCIe 4", 2).time_s < times(8192, tokens, "PCIe 4", 1).time_s


def test_all_reduces_of_half_a_millisecond_cost_more_than_half_a_model_gains():
    """The second report: 32 layers of two all_reduces, 0.5 ms each, forward alone, beside 34.5 ms of one card."""
    layers, one_s, reduce_s = 32, 34.5e-3, 0.5e-3
    wire = dataclasses.replace(hardware.link("PCIe 4"), alpha_s=reduce_s / 2, call_s=0.0)  # a ring of two: two steps
    found = times(4096, 1, wire, 2)
    forward_s = layers * found.communication_s / 2
    assert forward_s == pytest.approx(layers * 2 * reduce_s, rel=0.01)
    tokens_per_s = 1 / (one_s / 2 + forward_s)
    assert 17 < tokens_per_s < 1 / one_s, "slower than one card's 29, and no better than the measured 17 allows"
