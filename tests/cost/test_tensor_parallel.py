"""A layer cut over ranks: FLOPs add up to the whole layer's, bytes are Megatron's, copies of keys cost what they do."""

import pytest

from labkit.cost import comm, flops, hardware
from labkit.cost.groups import on_cluster, on_link
from labkit.cost.layout import Layout
from labkit.cost.links import FREE, NVLINK_4
from labkit.cost.moved import tensor_parallel as moved
from labkit.cost.named import named
from labkit.cost.parts import Device
from labkit.cost.tensor_parallel import kept_bytes, layer_time, llama_like, of_product, products

# Memory that costs nothing, so that times are FLOPs.
COUNTER = Device("counts FLOPs", (("bf16", 1.0),), 2**40, float("inf"), None, None, "none")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt3-1.3b", "llama-2-13b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_flops_of_all_ranks_are_the_layers(name, tp):
    shape, tokens, seq = named(name), 4096, 2048
    alone = layer_time(shape, tokens, seq, COUNTER, on_link(tp, FREE))
    assert tp * alone.compute_s == pytest.approx(3 * flops.layer_forward(shape, tokens, seq, causal=True))


def test_a_copied_kv_head_is_computed_on_each_of_its_ranks():
    shape, tokens = named("llama-3.1-8b"), 1024
    alone, eight, sixteen = (sum(2 * m * k * n for m, k, n in products(shape, tokens, tp)) * tp for tp in (1, 8, 16))
    assert eight == alone
    assert sixteen - alone == 2 * tokens * shape.hidden * 2 * shape.kv_width  # keys and values once more


@pytest.mark.parametrize("tp", [2, 8])
def test_a_layer_waits_for_four_all_reduces_of_its_hidden_states(tp):
    shape, tokens = named("llama-3.1-8b"), 8192
    layout = Layout(tp=tp, seq=tokens, sequence_parallel=False)
    one = 2 * tokens * shape.hidden
    ends = 2 * comm.sent_bytes("all_reduce", one, tp) + comm.sent_bytes("all_reduce", 12 * tokens, tp)
    sent = moved(shape, layout, 0)["all_reduce"] - ends  # without embedding, head and loss
    assert sent == pytest.approx(shape.layers * 4 * comm.sent_bytes("all_reduce", one, tp))
    found = layer_time(shape, tokens, tokens, hardware.device("H100"), on_link(tp, NVLINK_4))
    assert found.communication_s == pytest.approx(4 * comm.time_s("all_reduce", one, tp, NVLINK_4))


def test_tensor_parallel_keeps_norms_whole_and_sequence_parallel_all_of_it_over_t():
    shape, t, tokens = named("llama-3.1-8b"), 4, 8192
    alone, plain, sequence = (
        kept_bytes(shape, Layout(tp=tp, seq=tokens, precision="fp32", sequence_parallel=tp > 1 and on))
        for tp, on in ((1, False), (t, False), (t, True))
    )
    norms = 2 * tokens * (3 * 4 * shape.hidden + 4)  # input, normalised and scaled, and 1/rms
    assert plain == norms + (alone - norms) / t and sequence == alone / t
    gathered = kept_bytes(shape, Layout(tp=t, seq=tokens, precision="fp32"), gathered=True)
    assert gathered - sequence == 2 * 4 * tokens * shape.hidden * (t - 1) / t  # two of the scaled ones are whole


def test_one_rank_waits_for_nobody():
    found = layer_time(llama_like(1024), 512, 512, hardware.device("H100"), on_link(1, NVLINK_4))
    assert found.communication_s == 0 and found.share == 0


def test_across_nodes_a_rank_waits_longer():
    shape, card = named("llama-3.1-8b"), hardware.device("H100")
    groups = [on_cluster(hardware.cluster("DGX H100", nodes, per_node=8 // nodes)) for nodes in (1, 2)]
    inside, across = (layer_time(shape, 4096, 4096, card, group) for group in groups)
    assert across.compute_s == inside.compute_s and across.communication_s > 1.5 * inside.communication_s


def test_a_small_product_is_bound_by_memory():
    num_flops, num_bytes = of_product(8, 4096, 4096, 2)
    card = hardware.device("H100")
    assert (num_flops, num_bytes) == (2 * 8 * 4096**2, 2 * (2 * 8 * 4096 + 4096**2))
    assert card.time_s(num_flops, num_bytes, "bf16") == num_bytes / card.memory_bandwidth


def test_the_proportions_are_llama_3s():
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        real, like = named(name), llama_like(named(name).hidden)
        for field in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            assert getattr(like, field) == getattr(real, field)
    assert llama_like(256).heads == 16


@pytest.mark.parametrize(("name", "tp"), [("gpt2-xl", 2), ("qwen2.5-0.5b", 4), ("llama-2-7b", 3), ("llama-2-7b", 0)])
def test_what_cannot_be_cut_is_refused(name, tp):
    with pytest.raises(ValueError, match=f"{name} cannot be cut over {tp} ranks"):
        products(named(name), 16, tp)


def test_a_hidden_that_has_no_heads_is_refused():
    with pytest.raises(ValueError, match="multiple of 32, not 100"):
        llama_like(100)
