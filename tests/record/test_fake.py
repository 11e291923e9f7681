"""A 70B model on 64 fake ranks: what one rank holds is the formula's, to the byte, for states and for gradients."""

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.cost import eager, named, shapes, states
from labkit.cost.layout import Layout
from labkit.cost.memory import total
from labkit.model.fake import fake_fsdp_record, llama_shape
from labkit.model.llama import Shape
from labkit.record.events import Collective, Op
from labkit.record.held import KINDS, by_module, held
from labkit.record.trace import Trace
from tests.record import training

RANKS, LENGTH = 64, 2048


def gradients_before_the_step(record):
    """Bytes of gradients held when the optimizer's first op begins: the first after the last collective."""
    last = max(event.index for event in record.events if isinstance(event, Collective))
    first = next(e.index for e in record.events[last:] if isinstance(e, Op) and "add_" in e.name)  # its step counter
    kinds = dict(record.kinds)
    changes = [*record.begin, *((d.storage, d.num_bytes) for d in record.deltas if d.index < first)]
    return sum(num_bytes for storage, num_bytes in changes if kinds[storage] == "gradient")


def test_a_70b_layout_on_64_ranks_holds_what_the_formula_says(soak):
    whole = named.named("llama-3.1-70b")
    layers = whole.layers if soak else 4
    shape = dataclasses.replace(whole, layers=layers)
    record = fake_fsdp_record(llama_shape(whole, layers), RANKS, 1, LENGTH)
    found = held(record)
    each = states.per_parameter("zero", "fp32")
    expected = states.state_bytes(shapes.parameters(shape), each, 3, RANKS)
    tensors = 9 * layers + 3
    assert found.begin["parameter"] == found.end["parameter"] == expected.parameters
    assert gradients_before_the_step(record) == expected.gradients
    assert found.end["optimizer"] == expected.optimizer + 4 * tensors  # and a step counter for each tensor
    # What autograd holds when backward begins, as if every rank had its tokens on a processor of its own.
    layout = Layout(micro_batch=1, seq=LENGTH, precision="fp32", flash=True, activations="eager")
    saved = layers * total(eager.layer_saved(shape, layout)) + total(eager.first_saved(shape, layout))
    saved += total(eager.head_saved(shape, layout))
    assert max(found.by_kind["activation"]) == pytest.approx(saved, rel=0.01)
    assert (record.rank, record.world_size) == (0, RANKS) and not dist.is_initialized()
    gathered = [c for c in record.collectives if c.op == "all_gather"]
    assert sum(c.num_bytes for c in gathered) >= 2 * 4 * layers * shapes.layer_parameters(shape)


def test_a_fake_step_holds_what_a_real_one_holds(trained):
    """The same training on two real ranks over gloo: every kind, at the peak and at most, to the byte."""
    fake = held(fake_fsdp_record(training.SHAPE, 2, training.BATCH, training.LENGTH))
    real = held(trained("fsdp2", 2).results[0][1][0])
    for kind in set(KINDS) - {"temporary"}:
        assert max(fake.by_kind[kind]) == max(real.by_kind[kind]), kind
        assert fake.peak[kind] == real.peak[kind], kind
    assert abs(fake.peak_bytes - real.peak_bytes) < 1000  # a batch that the caller still holds, of another dtype


def serial_step(device=None):
    """Forward, backward and a step, on whatever the mode or the device makes; on meta there is no flash attention."""
    with torch.device(device or "cpu"), sdpa_kernel(SDPBackend.MATH):
        model = training.llama()
        optimizer = torch.optim.AdamW(model.parameters())
        gc.collect()
        with Trace(fake=True) as t:
            tokens = torch.zeros(2, 33, dtype=torch.long)
            training.loss_of(model(tokens[:, :-1].clone()), tokens[:, 1:].clone()).backward()
            optimizer.step()
    return held(t.record)


def most(found):
    return {kind: max(line) for kind, line in found.by_kind.items() if kind != "temporary"}


def test_meta_and_fake_tensors_are_counted_as_real_ones_when_asked():
    real = serial_step()
    with FakeTensorMode():
        fake = serial_step()
    meta = serial_step("meta")
    assert most(real)["gradient"] > 0 and most(real)["activation"] > 0
    assert most(fake) == most(real) == most(meta)
    assert abs(meta.peak_bytes - real.peak_bytes) < 1000  # another test's scraps


def test_a_shape_of_the_cost_model_is_our_llama():
    shape = llama_shape(named.named("llama-3.2-1b"), layers=3)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.tied) == (2048, 3, 32, 8, True)


@pytest.mark.parametrize(("name", "why"), [("gpt2", "biases, learned positions"), ("mixtral-8x7b", "experts")])
def test_what_is_no_plain_llama_is_refused(name, why):
    with pytest.raises(ValueError, match=f"no plain Llama: it has {why}.*would do"):
        llama_shape(named.named(name))


def test_a_process_group_in_the_way_is_told(tmp_path):
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="a process group is there already"):
            fake_fsdp_record(Shape(), 2)
    finally:
        dist.destroy_process_group()


def test_what_is_real_in_the_process_does_not_count_and_is_let_alone():
    def record():
        found = fake_fsdp_record(Shape(layers=1), 2, 1, 16)
        return held(found).by_kind, by_module(found), sorted(num_bytes for _, num_bytes in found.begin)

    first = record()
    real = training.llama()
    optimizer = torch.optim.AdamW(real.parameters())
    raw = torch.ones(10**6, requires_grad=True)
    other = torch.optim.SGD([raw], lr=0.1)
    with FakeTensorMode():
        another = torch.ones(10**6)
    assert record() == first
    assert not any(p._post_accumulate_grad_hooks for p in (*real.parameters(), raw))
    assert another.numel() == len(other.param_groups[0]["params"][0]) and len(optimizer.param_groups) == 1
