"""Kinds, owners and modules of bytes held: by hand where the answer is known, and in real training on ranks."""

import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.checkpoint import checkpoint

from labkit.record.held import KINDS, at_peak, by_module, held
from labkit.record.trace import Trace
from tests.record import training
from tests.record.played import compute, records

SIZE = 4 * 100 * 100  # bytes of a Linear(100, 100) without bias
P = sum(p.numel() for p in training.llama().parameters())


def linear():
    return nn.Linear(100, 100, bias=False)


def traced(run, **options):
    gc.collect()
    with Trace(**options) as t:
        kept = run()
    return t.record, kept


def grown(record, kind):
    return held(record).end[kind] - held(record).begin[kind]


def test_kinds_add_up_to_what_is_held_at_every_moment():
    training.quiet()
    step = training.serial()
    step()
    record, _ = traced(step)
    found = held(record)
    assert found.total == tuple(num_bytes for _, num_bytes in record.held_bytes)
    assert found.peak_bytes == record.peak_bytes == sum(found.peak.values()) == max(found.total)
    assert len(found.times_s) == len(record.deltas) + 1 and list(found.times_s) == sorted(found.times_s)
    assert 0 < found.peak_time_s < record.time_s and found.at(found.peak_time_s - 1e-9) != found.at(record.time_s)
    assert set(found.by_kind) == set(found.begin) == set(found.end) == set(found.peak) == set(KINDS)
    assert found.begin["parameter"] == 4 * P and found.begin["optimizer"] >= 8 * P
    assert found.begin["gradient"] == found.begin["activation"] == 0


def test_gradients_are_all_there_when_backward_has_ended():
    model = training.llama()
    tokens, targets = next(training.data())
    record, _ = traced(lambda: training.loss_of(model(tokens), targets).backward())
    assert grown(record, "gradient") == 4 * P
    assert grown(record, "parameter") == grown(record, "activation") == 0


def test_a_model_made_within_the_trace_is_known():
    def run():
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        return model, optimizer

    record, _ = traced(run)
    assert [grown(record, kind) for kind in ("parameter", "gradient", "optimizer")] == [SIZE, SIZE, 2 * SIZE + 4]


def test_a_model_made_and_thrown_away_within_the_trace_is_known():
    def run():
        model = linear()
        model.register_buffer("mask", torch.ones(50))

    found = held(traced(run)[0])
    assert max(found.by_kind["parameter"]) - found.begin["parameter"] == SIZE
    assert max(found.by_kind["buffer"]) - found.begin["buffer"] == 200


def test_a_gradient_that_a_hook_frees_at_once_was_a_gradient():
    model = linear()

    def free(parameter):
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(free)
    found = held(traced(lambda: model(torch.ones(2, 100)).sum().backward())[0])
    assert max(found.by_kind["gradient"]) - found.begin["gradient"] == SIZE
    assert found.end["gradient"] == found.begin["gradient"]


def test_weights_that_no_module_owns_are_the_optimizers_and_raw_ones_that_learn_are_parameters():
    model = linear()
    master = model.weight.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)
    raw = torch.ones(1000, requires_grad=True)
    other = torch.optim.SGD([raw], lr=0.1)

    def run():
        (model(torch.ones(2, 100)).sum() + raw.sum()).backward()
        master.grad = model.weight.grad.clone()
        optimizer.step()
        other.step()

    found = held(traced(run)[0])
    assert found.begin["optimizer"] == SIZE
    assert found.begin["parameter"] == SIZE + 4000


class OwnAdam:
    """No torch.optim.Optimizer, as a learner writes it."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.state = {"moments": [torch.zeros_like(p) for p in self.parameters]}


def test_an_optimizer_of_ones_own_is_known_when_it_is_given():
    model = linear()
    own = OwnAdam(model.parameters())
    assert held(traced(lambda: None)[0]).begin["optimizer"] == 0
    assert held(traced(lambda: None, optimizers=[own])[0]).begin["optimizer"] == SIZE


def test_what_a_forward_makes_and_a_backward_needs_is_an_activation_and_the_rest_is_temporary():
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    x = torch.ones(50, 100)

    def forward():
        return model(x).sum()

    record, loss = traced(forward)
    # ReLU's result is kept for its own backward and the second matrix; the first matrix's result is gone.
    assert grown(record, "activation") == 4 * 50 * 100 + 4  # and the loss
    found = held(record)
    assert max(found.by_kind["temporary"]) - found.begin["temporary"] == 4 * 50 * 100

    whole, _ = traced(lambda: forward().backward())
    assert max(held(whole).by_kind["activation"]) == 4 * 50 * 100 + 8  # with the gradient of the loss, which is 1
    assert held(whole).end["activation"] == 0
    owner = next(o for o in at_peak(whole, 0) if o.kind == "activation" and o.num_bytes == 4 * 50 * 100)
    assert (owner.module, owner.op, owner.count) == ("1", "aten.relu", 1) and __file__ in owner.place


def test_without_grad_nothing_is_kept_for_a_backward():
    model = nn.Sequential(linear(), nn.ReLU(), linear())

    def run():
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(50, 100))

    found = held(traced(run)[0])
    assert max(found.by_kind["activation"]) == 0 and found.peak["temporary"] > 0


def test_what_stays_after_a_backward_was_not_kept_for_it():
    model = linear()

    def run():
        moments = torch.zeros(1000)  # made with grad enabled, as a learner's optimizer does
        for _ in range(2):
            model(torch.ones(2, 100)).sum().backward()
        return moments

    record, _ = traced(run)
    assert grown(record, "temporary") == 4000 and grown(record, "activation") == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_one_tensor_a_block_and_brings_the_others_back(reentrant):
    blocks = nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU()) for _ in range(3))
    x = torch.ones(50, 100, requires_grad=True)
    one = 4 * 50 * 100

    def run(again: bool):
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
        y.sum().backward()

    def most(record):
        found = held(record)
        line = found.by_kind["activation"]
        return max(line) // one, {o.module for o in at_peak(record, 0) if o.kind == "activation"}

    assert most(traced(lambda: run(False))[0])[0] == 6  # two ReLUs a block
    num, modules = most(traced(lambda: run(True))[0])
    assert num == 5  # three outputs of blocks, and two ReLUs of one block: its last one twice
    assert modules & {"2.1", "2.3", "2"}


def test_in_backward_a_storage_is_the_modules_whose_forward_made_its_node():
    model = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh())
    x = torch.ones(50, 100)
    record, _ = traced(lambda: model(x).sum().backward())
    made = {}
    names = dict(record.modules)
    for op in record.ops:
        if op.name == "aten.tanh_backward":
            made.setdefault(op.name, []).append(names[op.writes[0]])
    assert made == {"aten.tanh_backward": ["3", "1"]}


def test_the_owners_and_the_modules_add_up_to_the_peak():
    training.quiet()
    step = training.serial()
    step()
    record, _ = traced(step)
    everything = at_peak(record, 0)
    assert sum(owner.num_bytes for owner in everything) == record.peak_bytes
    assert list(everything) == sorted(everything, key=lambda owner: -owner.num_bytes)
    assert at_peak(record, 3) == everything[:3] and len(at_peak(record)) == 20
    modules = by_module(record)
    assert sum(sum(kinds.values()) for kinds in modules.values()) == record.peak_bytes
    shape = training.SHAPE
    gate = modules["layers.1.mlp.gate_proj"]
    assert gate["parameter"] == 4 * shape.hidden * shape.ffn and gate["optimizer"] == 8 * shape.hidden * shape.ffn + 4
    assert gate["activation"] == 4 * shape.ffn * training.BATCH * training.LENGTH
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_record_by_hand_has_nothing_known():
    record = records([compute(10)])[0]
    assert held(record).peak_bytes == 0 and at_peak(record) == () and by_module(record) == {}


def test_nothing_of_a_trace_stays_on_torchs_or_the_learners_objects():
    def count():
        return len(module_hooks._global_forward_hooks), len(optimizer_hooks._global_optimizer_pre_hooks)

    model, before = linear(), count()
    with pytest.raises(ZeroDivisionError), Trace():
        model(torch.ones(2, 100)).sum().backward()
        assert count() == (before[0] + 1, before[1] + 1)
        raise ZeroDivisionError
    assert count() == before and not model.weight._post_accumulate_grad_hooks
    assert not module_hooks._global_forward_hooks_always_called


def test_a_module_that_raises_does_not_confuse_what_runs_next():
    class Breaks(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    outer, after = nn.Sequential(nn.Tanh(), Breaks()), nn.Sequential(nn.Tanh(), nn.Tanh())

    def run():
        with pytest.raises(ZeroDivisionError):
            outer(torch.ones(10))
        return torch.ones(1000) + 1, after(torch.ones(500, requires_grad=True))

    record, _ = traced(run)
    names = dict(record.modules)
    new = {delta.num_bytes: names.get(delta.storage, "") for delta in record.deltas if delta.num_bytes > 0}
    assert new[4000] == "" and new[2000] in ("Sequential 2.0", "Sequential 2.1")


def begins(trained, name, n, *arguments):
    return [held(result[1][0]).begin for result in trained(name, n, *arguments).results]


def test_ddp_holds_whole_states_and_a_bucket_of_the_gradients(trained):
    for begin in begins(trained, "ddp", 2, 0.1):
        assert begin["parameter"] == begin["communication"] == 4 * P
        assert 8 * P <= begin["optimizer"] <= 8 * P + 200 and begin["gradient"] == 0


def test_fsdp2_holds_a_shard_and_gathers_parameters(trained):
    for outcome in trained("fsdp2", 2).results:
        found = held(outcome[1][0])
        assert found.begin["parameter"] == 2 * P and 4 * P <= found.begin["optimizer"] <= 4 * P + 200
        layer = sum(p.numel() for p in training.llama().layers[0].parameters())
        assert max(found.by_kind["parameter"]) >= 2 * P + 4 * layer
        assert max(found.by_kind["gradient"]) >= 4 * layer


def test_dtensors_are_known_by_their_local_parts(trained):
    for begin in begins(trained, "tensor_parallel", 2):
        assert begin["parameter"] == begin["gradient"] == 4 * 2 * 96 * 384 // 2


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_divides_as_its_stage_says_and_its_bucket_has_a_bar_of_its_own(trained, soak, stage):
    if not soak and stage == 1:
        pytest.skip("the whole grid runs with --soak")
    for result in trained("deepspeed", 2, stage).results:
        found = held(result[1][0])
        assert found.begin["parameter"] == 4 * P // (2 if stage == 3 else 1)
        assert 6 * P <= found.begin["optimizer"] <= 6 * P + 200  # weights in fp32 and two moments, of half of them
        assert found.begin["gradient"] == (2 * P if stage == 3 else 0)
        assert max(found.by_kind["communication"]) >= 4 * 500_000
