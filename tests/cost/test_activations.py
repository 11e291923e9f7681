"""Activations: Korthikanti's equations and what autograd really holds, both to the byte; pipelines; invariants."""

import contextlib
from dataclasses import replace

import pytest

from labkit.cost import activations, eager, memory, shapes
from labkit.cost.layout import Layout
from labkit.cost.named import models, named
from labkit.cost.shapes import Shape
from tests.cost.published_memory import gpt

PAPER = {"22B": (48, 6144, 64, 4), "175B": (96, 12288, 96, 1), "530B": (105, 20480, 128, 1), "1T": (128, 25600, 160, 1)}
LLAMA = named("llama-3.1-8b")


def layer(shape, **kwargs):
    layout = Layout(**kwargs)
    return activations.kept(memory.layer_saved(shape, layout), shape, layout)


@pytest.mark.parametrize("size", PAPER)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikantis_bytes_per_layer_are_exact(size, t):
    layers, h, a, b = PAPER[size]
    s, shape = 2048, gpt(layers, h, a)
    given = {"seq": s, "micro_batch": b, "tp": t, "flash": False}
    alone = {**given, "sequence_parallel": False}
    sbh, scores = s * b * h, 5 * a * s * s * b
    assert t * layer(shape, **alone) == sbh * (10 * t + 24) + scores
    assert t * layer(shape, **given) == sbh * 34 + scores
    assert t * layer(shape, **alone, recompute="selective") == sbh * (10 * t + 24)
    assert t * layer(shape, **given, recompute="selective") == sbh * 34
    assert layer(shape, **alone, recompute="full") == 2 * sbh
    assert t * layer(shape, **given, recompute="full") == 2 * sbh
    assert layer(shape, **{**given, "flash": True}) == layer(shape, **given, recompute="selective")


def test_llamas_layer_by_the_same_rule():
    s, b, h, f, kv, a = 512, 3, LLAMA.hidden, LLAMA.ffn, LLAMA.kv_width, LLAMA.heads
    assert layer(LLAMA, seq=s, micro_batch=b) == 2 * s * b * (4 * h + 2 * h + 2 * kv + 4 * f)
    scores = layer(LLAMA, seq=s, micro_batch=b, flash=False) - layer(LLAMA, seq=s, micro_batch=b)
    assert scores == 2 * a * s * s * b


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_wider_numbers_double_everything_but_masks(precision):
    s, h = 128, 256
    shape = gpt(1, h, 4)
    masks = 2 * s * h
    assert layer(shape, seq=s, precision=precision) == masks + 32 * s * h * (2 if precision == "fp32" else 1)


def saved_by_torch(shape, b, s, dtype, math):
    """Bytes of all storages that autograd holds at the end of forward, parameters aside."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from labkit.model import llama

    small = llama.Shape(
        shape.vocab, shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.ffn, tied=shape.tied
    )
    torch.manual_seed(0)
    model = llama.Llama(small).to(dtype)
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    held = {}

    def pack(x):
        if x.untyped_storage()._cdata not in own:
            held.setdefault(x.untyped_storage()._cdata, x)
        return x

    tokens, targets = torch.randint(0, shape.vocab, (2, b, s)).unbind()
    path = sdpa_kernel(SDPBackend.MATH) if math else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), path:
        llama.loss_of(model(tokens), targets)
    return sum(x.untyped_storage().nbytes() for x in held.values())


@pytest.mark.parametrize("math", [False, True], ids=["flash", "math"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "h, a, kv, f, layers, b, s",
    [(64, 4, 4, 172, 1, 2, 32), (64, 4, 2, 172, 2, 1, 128), (128, 8, 1, 300, 3, 4, 64), (96, 6, 3, 256, 2, 3, 100)],
)
def test_eager_is_what_autograd_holds_to_the_byte(h, a, kv, f, layers, b, s, precision, math):
    torch = pytest.importorskip("torch")
    shape = Shape("small", layers, h, a, kv, h // a, f, 251)
    layout = Layout(seq=s, micro_batch=b, precision=precision, flash=not math, activations="eager")
    saved = [*eager.first_saved(shape, layout), *eager.head_saved(shape, layout)]
    want = layers * layer(shape, **{key: getattr(layout, key) for key in layout.__dataclass_fields__})
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert want + memory.total(saved) == saved_by_torch(shape, b, s, dtype, math)


def test_eager_is_what_autograd_holds_of_a_gpt_layer():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    h, a, b, s = 64, 4, 2, 32
    norms = [torch.nn.LayerNorm(h) for _ in range(2)]
    qkv, out, up, down = (torch.nn.Linear(i, j) for i, j in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)))
    own = {p.untyped_storage()._cdata for part in (*norms, qkv, out, up, down) for p in part.parameters()}
    held = {}

    def pack(x):
        if x.untyped_storage()._cdata not in own:
            held.setdefault(x.untyped_storage()._cdata, x)
        return x

    x = torch.randn(b, s, h, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        q, k, v = (part.view(b, s, a, -1).transpose(1, 2) for part in qkv(norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        z = x + F.dropout(out(y), 0.1)
        z = z + F.dropout(down(F.gelu(up(norms[1](z)))), 0.1)
    wider = 2 * b * s * h * 3  # a CPU's two masks are in fp32
    want = layer(gpt(1, h, a), seq=s, micro_batch=b, precision="fp32", activations="eager")
    assert sum(x.untyped_storage().nbytes() for x in held.values()) == want + wider


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 64])
def test_1f1b_keeps_as_many_microbatches_as_stages_follow(p, m):
    layout = Layout(pp=p, microbatches=m)
    assert [activations.in_flight(layout, stage) for stage in range(p)] == [min(m, p - stage) for stage in range(p)]


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 6])
def test_interleaving_keeps_more_on_the_first_stage_by_korthikantis_factor(p, v):
    layout = Layout(pp=p, microbatches=8 * p, interleave=v)
    extra = 0 if v == 1 else (p - 1) / (p * v)
    assert activations.in_flight(layout) == pytest.approx(p * (1 + extra), rel=1e-12)
    flight = [activations.in_flight(layout, stage) for stage in range(p)]
    assert flight == sorted(flight, reverse=True) and flight[-1] >= 1


def test_interleaving_never_keeps_more_microbatches_than_there_are():
    assert activations.in_flight(Layout(pp=4, microbatches=4, interleave=2)) == 4


@pytest.mark.parametrize("stage", [-1, 4])
def test_a_stage_that_is_not_there_is_refused(stage):
    with pytest.raises(ValueError, match="stage must be 0 to 3"):
        activations.in_flight(Layout(pp=4), stage)


def grown(layout, field, value):
    return replace(layout, **{field: value})


@pytest.mark.parametrize("shape", models(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("convention", ["megatron", "eager"])
@pytest.mark.parametrize("flash", [True, False])
def test_activations_grow_with_work_and_shrink_with_recomputation(shape, convention, flash):
    start = Layout(seq=512, activations=convention, flash=flash)
    one = memory.memory(shape, start)
    more = [memory.memory(shape, grown(start, field, value)) for field, value in (("micro_batch", 2), ("seq", 1024))]
    assert all(each.layers > one.layers and each.logits > one.logits for each in more)
    assert more[0].layers == pytest.approx(2 * one.layers, rel=2e-2) and more[0].parameters == one.parameters
    chosen = [memory.memory(shape, grown(start, "recompute", how)) for how in ("none", "selective", "full")]
    assert chosen[0].layers >= chosen[1].layers > chosen[2].layers
    assert chosen[0].recomputed == 0 and (chosen[1].recomputed > 0) == (not flash) and chosen[2].recomputed > 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt3-13b", "mixtral-8x7b", "qwen3-4b"])
@pytest.mark.parametrize("convention", ["megatron", "eager"])
def test_splitting_the_sequence_splits_activations_evenly(name, convention):
    shape = named(name)
    start = Layout(seq=2048, activations=convention, precision="fp32")
    whole = layer(shape, **vars_of(start))
    assert 4 * layer(shape, **vars_of(start) | {"cp": 4}) == pytest.approx(whole)
    assert 4 * layer(shape, **vars_of(start) | {"tp": 4}) == pytest.approx(whole)
    without = layer(shape, **vars_of(start) | {"tp": 4, "sequence_parallel": False})
    assert whole / 4 < without < whole


def vars_of(layout):
    return {key: getattr(layout, key) for key in layout.__dataclass_fields__}


def test_every_saved_tensor_has_a_name_a_cause_and_bytes():
    for convention in ("megatron", "eager"):
        for name in ("gpt3-175b", "llama-3.1-8b", "mixtral-8x7b"):
            layout = Layout(seq=1024, activations=convention, flash=False)
            saved = memory.layer_saved(named(name), layout)
            assert all(each.name and each.cause and each.num_bytes > 0 for each in saved)
            assert len({each.name for each in saved}) == len(saved)


@pytest.mark.parametrize("convention", ["zero", "megatron", "deepspeed"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parts_add_up_and_stages_hold_their_share(convention, zero):
    layout = Layout(dp=4, tp=2, pp=4, zero=zero, convention=convention, microbatches=8, seq=2048)
    held = [memory.memory(LLAMA, layout, stage) for stage in range(4)]
    for each in held:
        parts = (each.parameters, each.gradients, each.optimizer, each.layers, each.logits)
        assert each.total == sum(parts) + each.bucket + each.gathered + each.recomputed
    assert memory.memory(LLAMA, layout) == max(held, key=lambda each: each.total)
    assert [bool(each.logits) for each in held] == [False, False, False, True]


def test_the_pipeline_does_not_lower_the_first_stages_activations():
    one = memory.activation_bytes(LLAMA, Layout(), 0)[0]
    tokens = 8 * 4096
    first = memory.activation_bytes(LLAMA, Layout(pp=4, microbatches=4), 0)[0]
    last = memory.activation_bytes(LLAMA, Layout(pp=4, microbatches=4), 3)[0]
    assert first - 4 * tokens == one - tokens == 4 * last


def test_deepspeeds_bucket_is_whole_however_small_the_model():
    small = named("gpt2")
    given = {"dp": 2, "seq": 1024}
    size = shapes.parameters(small)
    assert memory.memory(small, Layout(**given, zero=2, convention="deepspeed")).bucket == 1_000_000_000
    assert memory.memory(small, Layout(**given, zero=2, convention="zero")).bucket == 2 * size
    assert memory.memory(small, Layout(**given, zero=2, convention="megatron")).bucket == 0
    assert memory.memory(small, Layout(seq=1024, zero=2, convention="deepspeed")).bucket == 0


def test_stage_3_gathers_a_unit_and_the_next():
    layout = Layout(dp=8, zero=3)
    units = memory.units(LLAMA, layout, 0)
    assert sum(units) == shapes.parameters(LLAMA) and len(units) == 34
    pair = max(a + b for a, b in zip(units[:-1], units[1:], strict=True))
    assert memory.memory(LLAMA, layout).gathered == 2 * pair + 2 * max(units)
    assert memory.memory(LLAMA, Layout(dp=8, zero=2)).gathered == 0
