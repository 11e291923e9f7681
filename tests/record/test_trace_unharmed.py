"""Whatever a learner has lying about, half-made or freed, a Trace begins, ends, and leaves nothing behind."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from labkit.record.held import by_module, held
from labkit.record.memory import Holdings
from labkit.record.trace import Trace


def left():
    """All that a trace puts on torch for a while."""
    hooks = [vars(module_hooks)[name] for name in vars(module_hooks) if name.startswith("_global_")]
    hooks += [vars(optimizer_hooks)[name] for name in vars(optimizer_hooks) if name.startswith("_global_")]
    patched = [dict(vars(owner)) for owner in (dist.ProcessGroup, dist.Work, torch.UntypedStorage)]
    return [len(each) for each in hooks if hasattr(each, "__len__")], patched, torch._C._len_torch_dispatch_stack()


class Forgets(nn.Module):
    def __init__(self):
        self.inner = nn.Linear(2, 2)  # raises: no super().__init__()


class Names(nn.Module):
    def named_modules(self, *args, **kwargs):
        raise ZeroDivisionError


class Attributes(nn.Module):
    def __getattr__(self, name):
        raise ZeroDivisionError


class Odd(torch.Tensor):
    def __tensor_flatten__(self):
        raise ZeroDivisionError


class Groups(torch.optim.SGD):
    """Has lists where torch has dicts."""

    def __init__(self, weight):
        super().__init__([weight], lr=0.1)
        self.param_groups = [[weight]]


def half_made_module(good):
    with pytest.raises(AttributeError) as caught:
        Forgets()
    return caught


def half_made_optimizer(good):
    with pytest.raises(TypeError) as caught:
        torch.optim.SGD(good.weight, lr=0.1)
    return caught


def lazy(good):
    return nn.LazyLinear(3)


def freed_wrapper(good):
    wrapper = nn.Sequential()
    wrapper.module = good
    wrapper.module = None
    return wrapper


CASES = [half_made_module, half_made_optimizer, lazy, freed_wrapper, lambda good: Names(), lambda good: Attributes(),
         lambda good: torch.ones(2).as_subclass(Odd), lambda good: Groups(good.weight)]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_lies_about_does_no_harm(case):
    gc.collect()
    good = nn.Linear(4, 4)
    before, kept = left(), case(good)
    with Trace() as trace:
        good(torch.ones(2, 4)).sum().backward()
    assert left() == before and not good.weight._post_accumulate_grad_hooks
    found = held(trace.record)
    assert found.end["gradient"] == found.begin["gradient"] + 4 * (4 * 4 + 4)
    assert "Linear" in by_module(trace.record) and kept is not None


def test_what_is_made_halfway_within_a_trace_does_no_harm():
    good, before = nn.Linear(4, 4), left()
    with Trace() as trace:
        kept = [case(good) for case in CASES]
        materialised = nn.LazyLinear(3)
        materialised(torch.ones(2, 100)).sum().backward()
    assert left() == before and len(kept) == len(CASES)
    assert by_module(trace.record)["Linear"]["gradient"] >= 4 * (300 + 3)


class Stops(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("where", [(Holdings, "walk"), (Holdings, "wrap_resize"), (Holdings, "totals")])
def test_a_trace_that_is_stopped_while_it_begins_leaves_nothing(monkeypatch, where):
    good, before = nn.Linear(4, 4), left()

    def stop(*_):
        raise Stops

    with monkeypatch.context() as patch:
        patch.setattr(*where, stop)
        with pytest.raises(Stops):
            with Trace(fake=True) as trace:
                pass
            _ = trace.record
    assert left() == before and not good.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("name", ["names", "resolver", "unwatch"])
def test_a_trace_that_is_stopped_while_it_ends_leaves_no_patch(monkeypatch, name):
    from labkit.record.running import Running

    good, before = nn.Linear(4, 4), left()
    original = getattr(Running, name)

    def stop(running):
        original(running)
        raise Stops

    with monkeypatch.context() as patch:
        patch.setattr(Running, name, stop)
        with pytest.raises(Stops):
            with Trace() as trace:
                good(torch.ones(2, 4)).sum().backward()
            _ = trace.record
    assert left() == before and not good.weight._post_accumulate_grad_hooks


def test_nested_traces_put_back_what_the_outer_one_put():
    gc.collect()
    before = left()
    with Trace() as outer:
        x = torch.ones(1000)
        with Trace():
            pass
        x.untyped_storage().resize_(0)
    assert left() == before and [d.num_bytes for d in outer.record.deltas] == [4000, -4000]


class Own:
    """Keeps optimizer state, as a learner's does."""

    def __init__(self, parameters):
        self.moments = [torch.zeros_like(p) for p in parameters]


def trained_twice():
    """Two traces of training with an optimizer of one's own, and weak references to all that they saw."""
    model = nn.Linear(100, 100)
    own = Own(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())

    traces = [Trace(optimizers=[own]), Trace(optimizers=[own])]
    for trace in traces:
        with trace:
            model(torch.ones(2, 100)).sum().backward()
            optimizer.step()
    seen = (model, own, own.moments[0], optimizer, model.weight, model.weight.grad)
    return *traces, [weakref.ref(each) for each in seen]


def test_a_finished_trace_keeps_nothing_alive():
    asked, unasked, alive = trained_twice()
    assert held(asked.record).end["optimizer"] >= 3 * 4 * 100 * 101
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    assert unasked.record.end_bytes == asked.record.end_bytes  # and it is still there to be read


def test_a_record_is_held_once():
    with Trace() as trace:
        for _ in range(100):
            torch.ones(1)
    record, raw = trace.record, gc.get_referents(trace.__dict__)
    assert len(record.events) == 100 and trace.record is record
    assert not [each for each in raw if hasattr(each, "rows") or hasattr(each, "holdings")]


def test_the_rank_is_that_of_the_block_whenever_the_record_is_read():
    def begin(rank):
        dist.init_process_group("fake", rank=rank, world_size=4)

    begin(1)
    try:
        with Trace() as over:
            pass
        with Trace() as destroyed_within:
            dist.destroy_process_group()
        with Trace() as made_within:
            begin(2)
    finally:
        dist.destroy_process_group()
    with Trace() as without:
        pass
    found = [(t.record.rank, t.record.world_size) for t in (over, destroyed_within, made_within, without)]
    assert found == [(1, 4), (1, 4), (2, 4), (0, 1)]
