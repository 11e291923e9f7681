"""Mistakes in data parallelism that people reported elsewhere: the numbers they saw, and what the lab's judges tell.

The reports with their sources are in tests/data/reported_problems.json. That every other wrong answer is told its
cause is tried by tests/classroom/test_prove.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from labkit.classroom import prove
from labkit.labs import lab02
from labkit.ranks.launch import launch
from tests.problems import problem


@pytest.fixture(scope="module")
def wrong(repo):
    """Wrong answers by exercise and cause."""
    rows = prove.load(repo / "tests" / "mistakes" / "lab02.py").WRONG
    return {exercise: {cause: fn for fn, cause in found} for exercise, found in rows.items()}


def told(exercise, fn):
    """The verdict of an exercise's judge on an answer."""
    return next(each for each in lab02.EXERCISES if each.id == exercise).judge(fn, 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sum_of_means_is_world_size_times_the_gradient(world_size, wrong):
    assert problem("D01")["input"]["ranks"] == 2

    def ratio():
        torch.manual_seed(0)
        model, rows = torch.nn.Linear(3, 1), torch.randn(4 * dist.get_world_size(), 3)
        model(rows).pow(2).mean().backward()
        whole = model.weight.grad.clone()
        model.zero_grad()
        model(rows.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean().backward()
        dist.all_reduce(model.weight.grad)
        return (model.weight.grad / whole).mean().item()

    assert launch(ratio, world_size) == pytest.approx([float(world_size)] * world_size, rel=1e-4)
    assert told("2.1", wrong["2.1"]["not_divided"]).cause == "not_divided"


def test_replicas_that_start_apart_stay_apart_by_as_much_while_both_losses_fall(wrong):
    steps = problem("D02")["input"]["steps"]

    def train():
        torch.manual_seed(dist.get_rank())
        model = torch.nn.Linear(3, 1)
        start, losses = model.weight.detach().clone(), []
        for step in range(steps):
            rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows.sum(1, keepdim=True)).pow(2).mean()
            model.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.data -= 0.1 * parameter.grad / dist.get_world_size()
            losses.append(loss.item())
        return start, model.weight.detach(), losses

    (start, end, losses), (other_start, other_end, other_losses) = launch(train, 2)
    assert (start - other_start).abs().max() > 0.1
    torch.testing.assert_close(end - other_end, start - other_start, rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0] and other_losses[-1] < other_losses[0]  # a look at losses does not catch it
    assert told("2.2", wrong["2.2"]["not_broadcast"]).cause == "not_broadcast"


def test_a_mean_of_unequal_means_is_refused_by_its_number(wrong):
    losses = [torch.tensor(each, dtype=torch.float32) for each in problem("D12")["input"]["losses"]]
    assert torch.stack([each.mean() for each in losses]).mean().item() == pytest.approx(5.5)
    assert torch.cat(losses).mean().item() == pytest.approx(2.8)
    verdict = told("2.3", wrong["2.3"]["mean_of_means"])
    assert verdict.cause == "mean_of_means" and verdict.stage == "values"


def test_summing_the_sum_again_after_each_microbatch_counts_the_first_too_often(wrong):
    local = problem("D14")["input"]["local"]

    def reduce(again):
        grad = torch.zeros(1)
        for value in local[dist.get_rank()]:
            grad += value
            if again:
                dist.all_reduce(grad)
        if not again:
            dist.all_reduce(grad)
        return grad.item() / 2

    once, again = launch(reduce, 2, False), launch(reduce, 2, True)
    assert (once, again) == ([21.0] * 2, [46.0] * 2)
    assert told("2.3", wrong["2.3"]["reduced_again"]).cause == "reduced_again"
    assert told("2.3", wrong["2.3"]["every_microbatch"]).cause == "every_microbatch"  # right number, thrice the bytes


@pytest.mark.parametrize(
    ("dtype", "values", "divide_first", "expected"),
    [
        (torch.bfloat16, (256.0, 1.0), False, 256.0),  # 8 bits of mantissa: the 1 is lost
        (torch.float16, (40000.0, 40000.0), False, float("inf")),
        (torch.float16, (40000.0, 40000.0), True, 40000.0),
        (torch.float32, (256.0, 1.0), False, 257.0),
    ],
)
def test_a_narrow_sum_loses_small_terms_or_overflows(dtype, values, divide_first, expected):
    assert "bf16 256+1" in problem("D18")["input"]["cases"]

    def add():
        tensor = torch.tensor([values[dist.get_rank()]], dtype=dtype)
        if divide_first:
            tensor /= dist.get_world_size()
        dist.all_reduce(tensor)
        return tensor.item()

    assert launch(add, 2) == [expected] * 2


def test_gradients_reduced_in_a_narrower_dtype_are_told(wrong):
    assert "fp32" in problem("D18")["right_answer"]
    assert told("2.1", wrong["2.1"]["dtype_lost"]).cause == "dtype_lost"


def test_workers_take_the_wait_away_and_their_own_cost_is_told():
    assert "more is not better" in problem("F05")["title"]
    settings = (lab02.Setting(0), lab02.Setting(2), lab02.Setting(0, cached=True))
    alone, workers, cached = lab02.load_with(settings, steps=6, read_s=0.02)
    assert alone.starved > cached.starved  # synthetic or cached batches show what loading costs
    assert alone.worker_bytes == cached.worker_bytes == () and len(workers.worker_bytes) == 2
    assert min(workers.worker_bytes) > 1e6 and workers.worker_cores > 0
