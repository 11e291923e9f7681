"""What a storage is for, as far as ops and communication tell: padding, scaling, shards that an optimizer keeps."""

import gc
from collections import deque
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.record.held import by_module, held
from labkit.record.trace import Trace

WORLD = 2


@pytest.fixture(autouse=True)
def fake_group():
    gc.collect()
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def kinds_of_size(record, num_bytes):
    """Kinds of the storages of a size that were made within."""
    kinds = dict(record.kinds)
    return {kinds[delta.storage] for delta in record.deltas if delta.num_bytes == num_bytes}


def cat(flat):
    return torch.cat([flat, torch.zeros(1)])


def cat_in_parts(flat):
    return torch.cat([flat[:20], flat[20:], flat.new_full((1,), 0.0)])


def pad(flat):
    return nn.functional.pad(flat, (0, 1))


def copied(flat):
    whole = torch.zeros(64)
    whole[:63].copy_(flat)
    return whole


def emptied(flat):
    return torch.cat([flat, torch.empty(1).zero_()])


PADS = [cat, cat_in_parts, pad, copied, emptied]
SCALES = [lambda x: x, lambda x: x / WORLD, lambda x: x * 0.5, lambda x: x.div_(WORLD)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("how", PADS)
def test_what_a_reduce_scatter_makes_of_padded_gradients_is_a_gradient(how, scale):
    model = nn.Linear(7, 9, bias=False)
    with Trace() as trace:
        model(torch.ones(2, 7)).sum().backward()
        part = torch.empty(32)
        dist.reduce_scatter_tensor(part, scale(how(model.weight.grad.flatten())))
        part.div_(WORLD)
    assert kinds_of_size(trace.record, part.nbytes) == {"gradient"}


@pytest.mark.parametrize("how", PADS)
def test_what_an_all_gather_makes_of_padded_parameters_is_a_parameter(how):
    model = nn.Linear(7, 9, bias=False)
    with Trace() as trace, torch.no_grad():
        whole = torch.empty(64, dtype=torch.float32)
        part = how(model.weight.flatten())[:32].clone()
        dist.all_gather_into_tensor(whole, part)
        found = whole + 1
    last = [delta.storage for delta in trace.record.deltas if delta.num_bytes == 4 * 64]
    gathered = next(event for event in trace.record.collectives).writes[0]
    kinds = dict(trace.record.kinds)
    assert kinds[gathered] == "parameter" and kinds[last[-1]] == "temporary" and found.numel() == 64


def test_padding_alone_and_what_is_mixed_into_gradients_is_no_gradient():
    model = nn.Linear(7, 9, bias=False)
    with Trace() as trace:
        model(torch.ones(2, 7)).sum().backward()
        other = torch.arange(1.0, 2.0)  # a number that somebody sends along
        out = torch.empty(32)
        dist.reduce_scatter_tensor(out, torch.cat([model.weight.grad.flatten(), other]))
        none = torch.empty(50)
        dist.reduce_scatter_tensor(none, torch.cat([torch.zeros(60), torch.zeros(40)]))
    assert kinds_of_size(trace.record, out.nbytes) == kinds_of_size(trace.record, none.nbytes) == {"communication"}


class Sharded:
    """A learner's optimizer that keeps its moments, a bucket, and a part of the gradients and of the weights."""

    def __init__(self, module):
        self.weight = module.weight
        self.moments = {"exp_avg": torch.zeros(50, 100), "exp_avg_sq": torch.zeros(50, 100)}
        self.bucket, self.gradients = torch.zeros(100, 100), torch.zeros(50, 100)
        self.part = module.weight.detach()[:50].clone()

    def step(self, gather):
        self.bucket.copy_(self.weight.grad)
        dist.reduce_scatter_tensor(self.gradients, self.bucket)
        self.weight.grad = None
        self.moments["exp_avg"].lerp_(self.gradients, 0.1)
        self.moments["exp_avg_sq"].addcmul_(self.gradients, self.gradients)
        self.part -= self.moments["exp_avg"]
        if gather:
            whole = torch.empty(100, 100)
            dist.all_gather_into_tensor(whole, self.part)


@pytest.mark.parametrize("inner", [False, True])
def test_what_an_optimizer_of_ones_own_keeps_is_what_it_is_for(inner):
    model = nn.Linear(100, 100, bias=False)
    own, one = Sharded(model), 4 * 50 * 100
    if inner:
        own.inner = torch.optim.SGD([own.part.requires_grad_()], lr=0.1)
    found = {}
    for gather in (False, True):
        with Trace(optimizers=[own]) as trace:
            model(torch.ones(2, 100)).sum().backward()
            with torch.no_grad():
                own.step(gather)
        found[gather] = held(trace.record).end
    assert found[False]["optimizer"] == 3 * one and found[True]["optimizer"] == 2 * one  # what is gathered from is
    assert found[True]["parameter"] == found[False]["parameter"] + one  # a parameter, whoever keeps it
    for gather in (False, True):
        assert found[gather]["gradient"] == one and found[gather]["communication"] == 2 * one


def test_what_a_module_gives_without_grad_is_no_activation():
    model = nn.Linear(100, 100)
    with Trace() as trace, torch.no_grad():
        y = model(torch.ones(500, 100))
    found = held(trace.record)
    assert found.end["activation"] == found.begin["activation"] == 0
    assert found.end["temporary"] - found.begin["temporary"] == y.nbytes


def test_what_was_there_before_and_is_thrown_away_after_a_backward_was_not_kept_for_it():
    model, batch = nn.Linear(100, 100), torch.ones(500, 100)
    with Trace() as trace:
        model(torch.ones(2, 100)).sum().backward()
        del batch
    found = held(trace.record)
    assert found.begin["activation"] == 0 and found.begin["temporary"] - found.end["temporary"] == 4 * 500 * 100


def test_what_was_there_before_and_a_backward_frees_was_kept_for_it():
    x = torch.ones(500, 100, requires_grad=True)
    loss = (x * 2).exp().sum()
    with Trace() as trace:
        loss.backward()
    found = held(trace.record)
    assert found.begin["activation"] - found.end["activation"] == 4 * 500 * 100


class Slots:
    __slots__ = ("moments", "never")

    def __init__(self):
        self.moments = deque([torch.zeros(1000)])


class Nested:
    def __init__(self):
        self.state = Slots()
        self.me = self  # no end

    def step(self): ...


def holders():
    one = torch.zeros(1000)
    plain = SimpleNamespace(state=SimpleNamespace(m={0: [one]}))
    return [one, [one], {"m": one}, plain, Slots(), Nested()]


@pytest.mark.parametrize("which", [0, 1, 2, 3, 4, 5])
def test_whatever_holds_the_state_is_followed(which):
    with Trace(optimizers=[holder := holders()[which]]) as trace:
        pass
    assert held(trace.record).begin["optimizer"] == 4000 and holder is not None


@pytest.mark.parametrize("nothing", [object(), SimpleNamespace(lr=0.1), 3, nn.ReLU(), [[]]])
def test_what_holds_no_tensor_is_refused(nothing):
    told = f"a {type(nothing).__name__} that holds no tensor;.*would do"
    with pytest.raises(ValueError, match=told), Trace(optimizers=[nothing]):
        pass
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_optimizer_with_a_dead_ones_id_is_looked_at():
    model = nn.Linear(100, 100, bias=False)
    first = torch.optim.AdamW(model.parameters())
    with Trace() as trace:
        labels = trace._labels
        model(torch.ones(2, 100)).sum().backward()
        first.step()
        second = torch.optim.AdamW(model.parameters())
        labels.optimizers[id(second)] = labels.optimizers[id(first)]  # as if it had taken the place in memory
        second.step()
        first = None
        gc.collect()
    assert held(trace.record).end["optimizer"] == 2 * 4 * 100 * 100 + 4


def two_models(order):
    models = [nn.Sequential(nn.Linear(100, 100, bias=False)) for _ in range(2)]
    with Trace() as trace:
        for which in order:
            models[which](torch.ones(2, 100))
    modules = by_module(trace.record)
    return {name: kinds["parameter"] for name, kinds in modules.items() if "parameter" in kinds}


@pytest.mark.parametrize("order", [[], [0], [1], [0, 1], [1, 0, 1]])
def test_two_models_have_names_of_their_own(order):
    assert two_models(order) == {"0": 40_000, "Sequential 2.0": 40_000}


def test_the_model_that_runs_first_keeps_its_names():
    small, large = nn.Sequential(nn.Linear(10, 10, bias=False)), nn.Sequential(nn.Linear(100, 100, bias=False))
    third = nn.Sequential(nn.Linear(5, 5, bias=False))
    with Trace() as trace:
        large(torch.ones(2, 100))
        small(torch.ones(2, 10))
    sizes = {name: kinds.get("parameter") for name, kinds in by_module(trace.record).items()}
    assert sizes["0"] == 40_000 and sizes["Sequential 2.0"] == 400 and sizes["Sequential 3.0"] == 100
    assert len(third) == 1


def test_models_without_a_name_in_common_keep_theirs():
    model, loss = nn.Sequential(nn.Linear(10, 10, bias=False)), nn.MSELoss()
    other = nn.ModuleDict({"head": nn.Linear(3, 3, bias=False)})
    with Trace() as trace:
        loss(model(torch.ones(2, 10)), torch.ones(2, 10)).backward()
    found = {name for name, kinds in by_module(trace.record).items() if "parameter" in kinds}
    assert found == {"0", "head"} and len(other) == 1
