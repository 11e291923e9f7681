"""Reported problems that belong to lab 04, on real ranks: who has the new values, whose norm, and empty weights.

Those with DeepSpeed wait for it. Left out: the estimators' lines (B04, B05), which tests/cost has.
"""

import importlib.util
import io

import pytest
import torch
import torch.distributed as dist

from labkit import launch
from labkit.classroom import prove
from labkit.labs import lab04
from labkit.labs.lab04 import clip
from slides import cells
from tests.problems import problem

pytestmark = pytest.mark.timeout(300)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="waits for deepspeed: pip install deepspeed"
)


@pytest.fixture(scope="module")
def wrong(repo):
    """Wrong answers by exercise and cause."""
    rows = prove.load(repo / "tests" / "mistakes" / "lab04.py").WRONG
    return {exercise: {cause: fn for fn, cause in found} for exercise, found in rows.items()}


def test_without_the_last_gather_half_of_the_elements_are_stale_and_the_loss_falls():
    n = problem("D09")["input"]["ranks"]
    assert "all-gather" in problem("D09")["cause"]

    def train(cls):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1, bias=False)
        start = model.weight.detach().clone()
        optimizer = cls(model.parameters(), lr=0.05)
        kept, losses = dist.all_gather, []
        for step in range(8):
            rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            dist.all_gather = lambda *args, **options: None
            optimizer.step()
            dist.all_gather = kept
            losses.append(loss.item())
        return (model.weight.detach() == start).float().mean().item(), losses, model.weight.detach()

    (stale, losses, weight), (_, _, other) = launch(train, n, cells.function("04", "ZeroOptimizer"), prints="quiet")
    assert stale == pytest.approx(1 / 2) and losses[-1] < losses[0]
    assert not weight.equal(other)


def test_an_optimizer_that_does_not_gather_is_told_so(wrong):
    judge = next(each.judge for each in lab04.EXERCISES if each.id == "4.1")
    assert "shards" in problem("D09")["right_answer"]
    assert judge(wrong["4.1"]["not_gathered"], 1).cause == "not_gathered"


def test_a_local_norm_is_not_the_norm(wrong):
    assert problem("D10")["setup"] == "shards [3,4] and [12,0]"
    shards = [[torch.tensor([3.0, 4.0])], [torch.tensor([12.0, 0.0])]]
    assert clip.Ask("D10", shards, 1.0).norm == 13
    for cause in ("local_norm", "largest_norm", "norms_added", "local_factor"):
        assert clip.judge(wrong["4.4"][cause], 1).cause == cause
    found = launch(lambda mine: cells.function("04", "clip_grad_norm")(mine, 1.0), 2, rank_args=[(s,) for s in shards])
    assert found == [13.0, 13.0]


def engine_of(zero, width=16):
    """Runs in a rank: a model of two layers within DeepSpeed's engine at stage 3."""
    from labkit.model.deepspeed import start_deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 1))
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    return start_deepspeed(model, settings)[0]


@needs_deepspeed
def test_a_second_partition_must_divide_the_ranks():
    cases = [case["config"]["zero_optimization"] for case in problem("A27")["input"]["cases"]]

    def start(zero):
        try:
            engine_of(zero)
        except AssertionError as error:
            return str(error)
        return "started"

    bad, good = (launch(start, 4, zero, prints="quiet", preload=("deepspeed",), deadline_s=120.0) for zero in cases)
    assert all("divisible" in said for said in bad), bad
    assert good == ["started"] * 4


@needs_deepspeed
def test_a_weight_of_stage_3_looks_empty_and_is_there_within_gathered_parameters():
    zero = problem("A28")["input"]["config"]["zero_optimization"]

    def look():
        import deepspeed

        engine = engine_of(zero)
        weight = engine.module[0].weight
        empty = tuple(weight.shape), sum(p.numel() for p in engine.module.parameters())
        told = tuple(weight.ds_shape), sum(p.ds_numel for p in engine.module.parameters())
        with deepspeed.zero.GatheredParameters(weight):
            whole = tuple(weight.shape)
        return empty, told, whole

    found = launch(look, 2, prints="quiet", preload=("deepspeed",), deadline_s=120.0)
    assert found == [(((0,), 0), ((16, 16), 16 * 16 + 16 + 16 + 1), (16, 16))] * 2


@needs_deepspeed
def test_a_state_dict_of_stage_3_is_empty_and_the_engine_gathers_one():
    zero = problem("A29")["input"]["config"]["zero_optimization"] | {"stage3_param_persistence_threshold": 0}

    def save(gather):
        engine = engine_of(zero | {"stage3_gather_16bit_weights_on_model_save": gather})
        plain = sum(tensor.numel() for tensor in engine.module.state_dict().values())
        if not gather:
            return plain
        gathered = engine._zero3_consolidated_16bit_state_dict()
        held = io.BytesIO()
        torch.save(gathered, held)
        return plain, sum(t.numel() for t in gathered.values()) if gathered else None, len(held.getvalue())

    assert launch(save, 2, False, prints="quiet", preload=("deepspeed",), deadline_s=120.0) == [0, 0]
    (plain, whole, num_bytes), _ = launch(save, 2, True, prints="quiet", preload=("deepspeed",), deadline_s=120.0)
    assert (plain, whole) == (0, 289) and num_bytes > 4 * 289
