"""FLOPs: against torch's counter, the papers' formulas against the count, and recomputation."""

import pytest

from labkit.cost import flops
from labkit.cost.named import models, named
from labkit.cost.shapes import Shape, parameters
from tests.cost.published_memory import gpt


@pytest.mark.parametrize("heads, kv_heads, layers", [(4, 4, 1), (4, 2, 2), (8, 1, 3)])
def test_forward_and_backward_are_what_torch_counts(heads, kv_heads, layers):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from labkit.model import llama

    b, s = 2, 24
    model = llama.Llama(llama.Shape(96, 64, layers, heads, kv_heads, 172))
    tokens = torch.randint(0, 96, (b, s))
    shape = Shape("small", layers, 64, heads, kv_heads, 64 // heads, 172, 96)
    # torch's counter does not know the CPU's flash kernel, so attention goes product by product.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = llama.loss_of(model(tokens), tokens)
    assert counter.get_total_flops() == flops.forward(shape, b * s, s)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * flops.forward(shape, b * s, s)


@pytest.mark.parametrize(
    "layers, h, vocab, s", [(24, 2048, 51200, 2048), (96, 12288, 51200, 2048), (12, 768, 50257, 1024)]
)
def test_korthikantis_model_flops_are_the_count(layers, h, vocab, s):
    counted = flops.model_flops(gpt(layers, h, None, vocab), 3 * s, s)
    assert counted == pytest.approx(flops.korthikanti_flops(3, s, layers, h, vocab), rel=1e-12)


def test_narayanans_formula_is_the_count_with_full_recomputation():
    shape = gpt(96, 12288, 96, 51200)
    counted = flops.hardware_flops(shape, 2 * 2048, 2048, "full")
    assert flops.narayanan_flops(2, 2048, 96, 12288, 51200) == pytest.approx(counted, rel=1e-12)
    assert flops.korthikanti_flops(2, 2048, 96, 12288, 51200, "full") == pytest.approx(counted, rel=1e-12)


def test_one_more_forward_of_the_core_is_a_third_of_what_korthikantis_appendix_adds():
    shape, sizes = gpt(96, 12288, 96, 51200), (1, 2048, 96, 12288, 51200)
    again = flops.recomputed(shape, 2048, 2048, "selective")
    added = flops.korthikanti_flops(*sizes, "selective") - flops.korthikanti_flops(*sizes)
    assert added == pytest.approx(3 * again, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-405b"])
def test_palms_rule_is_the_count_but_for_the_embedding_and_norms(name):
    shape, s = named(name), 4096
    counted = flops.model_flops(shape, s, s) / s
    ruled = flops.palm_per_token(parameters(shape), shape.layers, shape.hidden, s)
    assert counted <= ruled and ruled - counted == pytest.approx(6 * shape.vocab * shape.hidden, rel=0.02)


@pytest.mark.parametrize("shape", models(), ids=lambda shape: shape.name)
def test_flops_grow_with_tokens_and_recomputation_and_shrink_under_the_mask(shape):
    one = flops.model_flops(shape, 512, 512)
    assert flops.model_flops(shape, 1024, 512) == 2 * one < flops.model_flops(shape, 1024, 1024)
    assert flops.model_flops(shape, 512, 512, causal=True) < one
    done = [flops.hardware_flops(shape, 512, 512, how) for how in ("none", "selective", "full")]
    assert one == done[0] < done[1] < done[2] < one * 4 / 3


def test_only_active_experts_compute():
    shape = named("mixtral-8x7b")
    one = Shape("one", 32, 4096, 32, 8, 128, 2 * 14336, 32000)
    assert flops.forward(shape, 64, 64) == flops.forward(one, 64, 64) + 2 * 64 * 32 * 8 * 4096


def test_under_the_mask_a_token_sees_half_the_keys():
    shape, s = named("gpt2"), 64
    seen = sum(range(1, s + 1))
    assert flops.core_forward(shape, s, s, causal=True) == 4 * seen * shape.query_width


@pytest.mark.parametrize("call", [flops.recomputed, flops.hardware_flops])
def test_an_unknown_recomputation_is_refused(call):
    with pytest.raises(ValueError, match="none, selective or full, not 'some'"):
        call(named("gpt2"), 8, 8, "some")


def test_utilization_needs_a_time():
    with pytest.raises(ValueError, match="more than 0"):
        flops.utilization(1e12, 0, 8, 1e12)
