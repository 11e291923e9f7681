"""The three ZeRO classes and DeepSpeed at stages 0 to 3 train as serial AdamW does, and what each of them sends.

A small Llama on real text, in fp32, whose number of parameters 2, 3 and 4 do not divide. A number of ranks drawn by
the seed that is told; all of them under --soak.
"""

import random
import sys
import warnings

import cloudpickle
import pytest
import torch
from torch import nn

from labkit.check.sealed import fresh_seed
from labkit.classroom import prove
from labkit.model.llama import Llama, Shape, loss_of
from labkit.model.text import batches
from labkit.ranks.launch import run_ranks

SHAPE = Shape(hidden=28, layers=2, heads=2, kv_heads=1, ffn=45)
BATCH, LENGTH, STEPS = 2, 24, 20
WORLD_SIZES = (2, 3, 4)


@pytest.fixture(scope="module", autouse=True)
def by_value():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def classes(repo):
    """The notebook's three answers."""
    mistakes = prove.load(repo / "tests" / "mistakes" / "lab04.py")
    return [mistakes.RIGHT[exercise][0] for exercise in ("4.1", "4.2", "4.3")]


@pytest.fixture(scope="module")
def world_sizes(soak):
    seed = fresh_seed()
    print(f"LABKIT_SEED={seed} draws the same number of ranks")
    return WORLD_SIZES if soak else (random.Random(seed).choice(WORLD_SIZES),)


class Scaled(nn.Module):
    """The Llama, and one number by which its logits are multiplied, so that the number of parameters is odd."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.llama, self.scale = Llama(SHAPE), Scale()

    def forward(self, tokens):
        return self.scale(self.llama(tokens))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def serial(world_size):
    """Losses by step, then rank: one model, on the batches of all ranks."""
    model, losses = Scaled(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sources = [batches(BATCH, LENGTH, 0, rank, world_size, STEPS) for rank in range(world_size)]
    for step in zip(*sources, strict=True):
        optimizer.zero_grad()
        each = [loss_of(model(tokens), targets) for tokens, targets in step]
        (sum(each) / world_size).backward()
        optimizer.step()
        losses.append([loss.item() for loss in each])
    return losses


def train(cls, rank, world_size, steps=STEPS, record=False):
    """Losses by step of one rank; and, if asked, elements sent in the last step, by op."""
    warnings.simplefilter("ignore")
    model = Scaled()
    whole = issubclass(cls, nn.Module)
    answer = cls(model if whole else model.parameters(), lr=1e-3)

    def step(tokens, targets):
        loss = loss_of((answer if whole else model)(tokens), targets)
        loss.backward()
        answer.step()
        answer.zero_grad()
        return loss.item()

    return stepped(step, rank, world_size, steps, record)


def stepped(step, rank, world_size, steps, record):
    from labkit.record.trace import Trace

    source, losses = batches(BATCH, LENGTH, 0, rank, world_size, steps), []
    for number, (tokens, targets) in enumerate(source):
        if record and number == steps - 1:
            with Trace() as trace:
                losses.append(step(tokens, targets))
            sent = {}
            for event in trace.record.collectives:
                if "float" in event.dtype:
                    sent[event.op] = sent.get(event.op, 0) + event.sent_bytes / event.element_bytes
            return losses, sent
        losses.append(step(tokens, targets))
    return losses


def all_classes(classes, rank, world_size):
    return [train(cls, rank, world_size) for cls in classes]


def with_deepspeed(rank, world_size, stages, steps, record):
    """The same by DeepSpeed, stage after stage."""
    from labkit.model.deepspeed import start_deepspeed

    warnings.simplefilter("ignore")
    found = []
    for stage in stages:
        zero = {"stage": stage, "allgather_bucket_size": 100_000, "reduce_bucket_size": 100_000}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0,
                     "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}  # fmt: skip
        config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": zero, "gradient_clipping": 0.0}
        engine, _ = start_deepspeed(Scaled(), config, learning_rate=1e-3)

        def step(tokens, targets, engine=engine):
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            return loss.item()

        found.append(stepped(step, rank, world_size, steps, record))
    return found


def with_fsdp2(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    model = Scaled()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.llama.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens, targets):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return stepped(step, rank, world_size, 2, True)


def on_ranks(fn, world_size, *args, **options):
    rank_args = [(*args[:1], rank, world_size, *args[1:]) if args and fn is not with_deepspeed else
                 (rank, world_size, *args) for rank in range(world_size)]  # fmt: skip
    outcome = run_ranks(fn, world_size, rank_args=rank_args, prints="quiet", deadline_s=300, **options)
    assert outcome.cause is None, outcome.cause
    return outcome.results


def assert_as_serial(by_rank, world_size, names):
    due = torch.tensor(serial(world_size))
    for number, name in enumerate(names):
        got = torch.tensor([rank[number] for rank in by_rank]).T
        torch.testing.assert_close(got, due, rtol=1e-5, atol=0.0, msg=lambda text, name=name: f"{name}: {text}")


def test_the_model_has_a_number_of_parameters_that_no_number_of_ranks_divides():
    count = sum(p.numel() for p in Scaled().parameters())
    assert all(count % world_size for world_size in WORLD_SIZES)


@pytest.mark.timeout(600)
def test_zero_1_2_and_3_train_as_serial_adamw(classes, world_sizes):
    for world_size in world_sizes:
        assert_as_serial(on_ranks(all_classes, world_size, classes), world_size, [cls.__name__ for cls in classes])


@pytest.mark.timeout(900)
def test_deepspeed_trains_as_serial_adamw_at_every_stage(world_sizes):
    pytest.importorskip("deepspeed")
    for world_size in world_sizes:
        got = on_ranks(with_deepspeed, world_size, (0, 1, 2, 3), STEPS, False, preload=("deepspeed",))
        assert_as_serial(got, world_size, [f"stage {stage}" for stage in range(4)])


@pytest.mark.timeout(600)
def test_deepspeed_all_reduces_at_stages_1_and_2_which_is_3_psi_and_stage_3_gathers_twice():
    pytest.importorskip("deepspeed")
    world_size = 2
    psi = sum(p.numel() for p in Scaled().parameters()) * (world_size - 1) / world_size
    rows = on_ranks(with_deepspeed, world_size, (1, 2, 3), 2, True, preload=("deepspeed",))[0]
    stage1, stage2, stage3 = (sent for _, sent in rows)
    for sent in (stage1, stage2):
        assert sent["all_reduce"] == pytest.approx(2 * psi, rel=0.01)
        assert sent["all_gather"] == pytest.approx(psi, rel=0.01)
        assert "reduce_scatter" not in sent
    assert stage3["reduce_scatter"] == pytest.approx(psi, rel=0.01)
    assert psi < stage3["all_gather"] <= 2 * psi * 1.01


@pytest.mark.timeout(600)
def test_fsdp2_sends_less_than_3_psi_because_its_root_is_gathered_once():
    world_size = 2
    model = Scaled()
    layers = sum(p.numel() for p in model.llama.layers.parameters())
    total = sum(p.numel() for p in model.parameters())
    _, sent = on_ranks(with_fsdp2, world_size)[0]
    share = (world_size - 1) / world_size
    assert sent["reduce_scatter"] == pytest.approx(total * share, rel=0.01)
    assert sent["all_gather"] == pytest.approx((total + layers) * share, rel=0.01)
    assert sum(sent.values()) < 2.5 * total * share
