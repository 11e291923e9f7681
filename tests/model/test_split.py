"""I and W together are B: the same gradients and the same FLOPs, none of them twice, W's own work done in W."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.model.llama import Layer, Shape, rotary
from labkit.model.split import backward_input, backward_weights

SHAPE = Shape(hidden=16, heads=2, kv_heads=1, ffn=24)


class Twice(nn.Module):
    """One weight used at two places of the way, and another that is used by way of a product of weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.gain = nn.Parameter(torch.randn(16))

    def forward(self, x):
        x = torch.tanh(self.a(x)) + x
        x = torch.nn.functional.linear(x, self.b.weight * self.gain)
        return self.a(x) * self.gain


class Aside(nn.Module):
    """A weight that is added at the end, one that nothing uses, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.inner, self.frozen = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shift, self.unused = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.inner(x)) + torch.exp(self.shift)


class OfLlama(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(SHAPE)

    def forward(self, x):
        return self.layer(x, *rotary(x.shape[1], SHAPE.head_dim, 1e4))


PLAIN = (OfLlama, Aside, lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)))


def case(make):
    torch.manual_seed(1)
    module, x = make(), torch.randn(2, 5, 16)
    return module, x, torch.randn(2, 5, 16)


def whole(module, x, gradient):
    entry = x.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        module(entry).backward(gradient)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return entry.grad, found, counter.get_total_flops()


@pytest.mark.parametrize("make", [*PLAIN, Twice])
def test_i_gives_the_inputs_gradient_and_w_later_the_weights(make):
    module, x, gradient = case(make)
    expected, weights, _ = whole(module, x, gradient)
    entry = x.clone().requires_grad_()
    found, pieces = backward_input(module(entry), gradient, entry, module.parameters())
    assert torch.allclose(found, expected, atol=1e-6)
    assert entry.grad is None and all(parameter.grad is None for parameter in module.parameters())
    backward_weights(pieces)
    assert pieces == []
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (weights[name] is None), name
        assert parameter.grad is None or torch.allclose(parameter.grad, weights[name], atol=1e-6), name


@pytest.mark.parametrize("make", PLAIN)
def test_i_and_w_have_the_flops_of_a_whole_backward_and_do_nothing_twice(make):
    module, x, gradient = case(make)
    _, _, flops = whole(module, x, gradient)
    entry = x.clone().requires_grad_()
    with FlopCounterMode(display=False) as forward:
        output = module(entry)
    with FlopCounterMode(display=False) as first:
        _, pieces = backward_input(output, gradient, entry, module.parameters())
    with FlopCounterMode(display=False) as later:
        backward_weights(pieces)
    products = [m for m in module.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    assert later.get_total_flops() == sum(2 * 10 * m.weight.numel() for m in products) > 0
    assert forward.get_total_flops() + first.get_total_flops() + later.get_total_flops() == flops


def test_a_second_microbatch_adds_to_what_is_there():
    module, x, gradient = case(OfLlama)
    _, once, _ = whole(module, x, gradient)
    for _ in range(2):
        entry = x.clone().requires_grad_()
        backward_weights(backward_input(module(entry), gradient, entry, module.parameters())[1])
    assert all(torch.allclose(p.grad, 2 * once[name], atol=1e-5) for name, p in module.named_parameters())


def test_other_microbatches_may_come_between_i_and_its_w():
    module, x, gradient = case(OfLlama)
    _, one, _ = whole(module, x, gradient)
    _, other, _ = whole(module, -x, 2 * gradient)
    entries = [x.clone().requires_grad_(), (-x).requires_grad_()]
    outputs = [module(entry) for entry in entries]
    later = [backward_input(y, g, e, module.parameters())[1]
             for y, g, e in zip(outputs, (gradient, 2 * gradient), entries, strict=True)]  # fmt: skip
    for pieces in reversed(later):
        backward_weights(pieces)
    assert all(torch.allclose(p.grad, one[name] + other[name], atol=1e-5) for name, p in module.named_parameters())


def test_a_stage_that_does_not_use_its_input_is_refused():
    shift = nn.Parameter(torch.ones(3))
    entry = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on its input"):
        backward_input(shift * 2, torch.ones(3), entry, [shift])
