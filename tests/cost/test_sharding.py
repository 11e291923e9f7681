"""Hybrid sharding, ZeRO++ and expert parallelism: bytes held and sent, by hand and as published; what cannot be."""

from dataclasses import replace

import pytest

from labkit.cost import changes, memory, moved, overheads, programs, shapes, sharding
from labkit.cost.comm import sent_bytes
from labkit.cost.estimate import assumptions, bandwidth, estimate, node_of
from labkit.cost.hardware import device
from labkit.cost.layout import Layout
from labkit.cost.named import named

LLAMA, MIXTRAL = named("llama-3.1-8b"), named("mixtral-8x7b")
P = shapes.parameters(LLAMA)
EXPERTS = 32 * 8 * shapes.mlp_parameters(MIXTRAL)
DENSE = shapes.parameters(MIXTRAL) - EXPERTS


def sent(shape, **given):
    return moved.communication_bytes(shape, Layout(**given), 0)


@pytest.mark.parametrize("within, each", [(1, 16), (2, 8), (4, 4), (8, 2), (32, 0.5), (0, 0.5)])
def test_hybrid_sharding_divides_by_a_group_and_keeps_copies_beyond_it(within, each):
    held = memory.memory(LLAMA, Layout(dp=32, zero=3, shard_within=within))
    assert held.parameters + held.gradients + held.optimizer == pytest.approx(each * P, abs=64)


@pytest.mark.parametrize("within", [2, 4, 8])
@pytest.mark.parametrize("k", [1, 3])
def test_hybrid_sharding_gathers_within_a_group_and_reduces_a_part_among_groups(within, k):
    found = sent(LLAMA, dp=16, zero=3, shard_within=within, microbatches=k)
    size = 2 * P
    assert found["shard"]["all_gather"] == pytest.approx(2 * k * sent_bytes("all_gather", size, within))
    assert found["shard"]["reduce_scatter"] == pytest.approx(k * sent_bytes("reduce_scatter", size, within))
    assert found["dp"] == {"all_reduce": pytest.approx(k * sent_bytes("all_reduce", size / within, 16 // within))}


def test_one_group_is_plain_zero_and_groups_of_one_are_plain_data_parallelism():
    plain = sent(LLAMA, dp=8, zero=3)["dp"]
    assert sent(LLAMA, dp=8, zero=3, shard_within=8) == {"shard": plain}
    assert sent(LLAMA, dp=8, zero=2, shard_within=1) == {"dp": sent(LLAMA, dp=8)["dp"]}


def test_less_leaves_the_node_with_hybrid_sharding_and_more_is_held():
    whole, hybrid = (estimate(LLAMA, Layout(dp=64, zero=3, shard_within=n), "H100") for n in (0, 8))
    assert sum(hybrid.communication["dp"].values()) < sum(whole.communication["dp"].values()) / 8
    assert hybrid.memory.total > whole.memory.total and hybrid.gpu_time_s < whole.gpu_time_s
    assert any("8 ranks, of which there are 8 groups" in each for each in assumptions(hybrid))


def test_torchtitan_shards_within_a_group_too():
    layout = Layout(dp=32, zero=3, recompute="full", program="torchtitan")
    one, other = (programs.held(LLAMA, replace(layout, shard_within=n)) for n in (0, 8))
    assert other.optimizer == pytest.approx(4 * one.optimizer, abs=64) and other.gathered == one.gathered


@pytest.mark.parametrize(
    "zeropp, dp, shard",
    [
        ("none", {"all_gather": 2, "reduce_scatter": 1}, {}),
        ("qwz", {"all_gather": 1, "reduce_scatter": 1}, {}),
        ("hpz", {"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1}),
        ("qgz", {"all_gather": 2, "all_to_all": 1 / 32}, {"all_to_all": 1 / 4}),
        ("qwz+hpz", {"all_gather": 1 / 2, "reduce_scatter": 1}, {"all_gather": 1}),
        ("all", {"all_gather": 1 / 2, "all_to_all": 1 / 32}, {"all_gather": 1, "all_to_all": 1 / 4}),
    ],
)
def test_zeropp_sends_these_shares_of_the_16_bit_parameters(zeropp, dp, shard):
    """On 64 ranks in nodes of 8: a ring's (n-1)/n taken away."""
    found = sent(LLAMA, dp=64, zero=3, zeropp=zeropp)
    ranks = {"dp": 64, "shard": 8}
    got = {
        axis: {
            op: size / (2 * P) / sent_bytes("all_gather", 1, 8 if op == "all_to_all" else ranks[axis])
            for op, size in ops.items()
        }
        for axis, ops in found.items()
    }
    assert got["dp"] == pytest.approx(dp, rel=1e-6) and got.get("shard", {}) == pytest.approx(shard, rel=1e-6)


def test_the_second_copy_of_hpz_is_a_nodes_part_of_the_parameters():
    plain, second = (memory.memory(LLAMA, Layout(dp=64, zero=3, zeropp=on)) for on in ("none", "hpz"))
    assert second.secondary == 2 * -(-P // 8) and plain.secondary == 0
    assert second.buffers - plain.buffers == second.secondary == second.total - plain.total
    assert memory.memory(LLAMA, Layout(dp=64, zero=3, zeropp="hpz", per_node=4)).secondary == 2 * -(-P // 4)


@pytest.mark.parametrize(
    "name, axes, ranks",
    [
        ("H100", {"dp": 64}, 8),
        ("H100", {"dp": 4}, 4),
        ("H100", {"dp": 32, "tp": 2}, 4),
        ("H100", {"dp": 16, "cp": 2, "tp": 2}, 4),
        ("H100", {"dp": 8, "tp": 8}, 1),
        ("H100", {"dp": 8, "tp": 16}, 1),
        ("RTX 4090", {"dp": 16}, 4),
        ("V100-32", {"dp": 64, "per_node": 16}, 16),  # a DGX-2
    ],
)
def test_a_node_has_as_many_ranks_as_tp_leaves_of_its_gpus(name, axes, ranks):
    precision = "fp16" if name == "V100-32" else "bf16"
    found = estimate(named("llama-2-70b"), Layout(zero=3, zeropp="all", precision=precision, **axes), name)
    own = shapes.stage_parameters(found.shape, found.layout.tp)
    assert found.layout.node_ranks == ranks and found.memory.secondary == 2 * -(-own // ranks)
    many = 2 * own / 4
    axis = found.communication
    assert axis["dp"].get("all_to_all", 0) == pytest.approx(
        sent_bytes("all_to_all", many / ranks, found.layout.shards // ranks), abs=1
    )
    assert axis.get("shard", {}).get("all_to_all", 0) == pytest.approx(sent_bytes("all_to_all", many, ranks), abs=1)
    assert bandwidth(found.layout, found.device, "shard") == node_of(found.device).intra.bandwidth
    assert any(f"in nodes of {ranks} of the" in each for each in assumptions(found))


@pytest.mark.parametrize(
    "name, given, want",
    [
        ("H100", {"tp": 8, "dp": 8, "per_node": 8}, "more than the 8 GPUs of a node of H100; per-node 1 would do"),
        ("H100", {"tp": 2, "dp": 32, "per_node": 8}, "tp 2 x per-node 8 .*; per-node 1, 2 or 4 would do"),
        ("H100", {"dp": 64, "per_node": 16}, "per-node 1, 2, 4 or 8 would do"),
        ("V100-32", {"dp": 64, "per_node": 32, "precision": "fp16"}, "16 GPUs of a node of V100-32"),
    ],
)
def test_more_ranks_than_a_node_has_are_refused(name, given, want):
    with pytest.raises(ValueError, match=want):
        estimate(LLAMA, Layout(zero=3, zeropp="all", **given), name)


@pytest.mark.parametrize("name, per_node", [("H100", 0), ("H100", 4), ("H100", 8), ("RTX 4090", 0), ("RTX 4090", 4)])
def test_the_nodes_of_a_change_are_the_devices_own(name, per_node):
    count = node_of(device(name)).count
    before = estimate(named("llama-3.1-70b"), Layout(dp=16, zero=3, zeropp="all", per_node=per_node), name)
    near = [each for each in changes.neighbours(before.shape, before.layout, before) if each.quantised]
    assert {each.tp for each in near} > {1, 2}
    for layout in near:
        assert layout.tp <= count and layout.tp * layout.node_ranks <= (per_node or count)
        assert layout.per_node == per_node // layout.tp or layout.per_node == 1
        words = changes.options(before.layout, layout)
        assert ("--per-node" in words) == (per_node > 0 and layout.tp > 1)


def test_all_of_zeropp_is_its_three_parts():
    assert Layout(dp=8, zero=3, zeropp="all").quantised == {"qwz", "hpz", "qgz"}
    assert sent(LLAMA, dp=8, zero=3, zeropp="all") == sent(LLAMA, dp=8, zero=3, zeropp="qgz+qwz+hpz")
    said = assumptions(estimate(LLAMA, Layout(dp=8, zero=3, zeropp="all")))
    assert any("ZeRO++ (hpz, qgz, qwz" in each for each in said)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_has_its_part_of_the_experts_and_zero_divides_both_kinds(ep, zero):
    held = memory.memory(MIXTRAL, Layout(dp=16, zero=zero, ep=ep))
    whole, part = {0: (16, 0), 1: (4, 12), 3: (0, 16)}[zero]
    want = DENSE * (whole + part / 16) + EXPERTS / ep * (whole + part / (16 / ep))
    assert held.parameters + held.gradients + held.optimizer == pytest.approx(want, abs=64)


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters", "nvme"])
@pytest.mark.parametrize("dp, ep", [(16, 1), (16, 2), (16, 8), (8, 8), (4, 4), (2, 2), (2, 1)])
def test_zero_3_gathers_of_a_layers_experts_those_that_are_divided(dp, ep, offload):
    """All experts of a rank, or none where they lie there whole, unless they come up from the host."""
    found = memory.memory(MIXTRAL, Layout(dp=dp, zero=3, ep=ep, offload=offload)).gathered
    there = 8 // ep if dp > ep or offload in ("parameters", "nvme") else 0
    layer = shapes.layer_parameters(MIXTRAL) - (8 - there) * shapes.mlp_parameters(MIXTRAL)
    ends = MIXTRAL.vocab * MIXTRAL.hidden
    head = ends + MIXTRAL.hidden
    assert found == 2 * max(2 * layer, layer + head) + 2 * max(layer, head)


@pytest.mark.parametrize("dp, ep, copies", [(8, 8, "1 copy"), (16, 8, "2 copies"), (16, 2, "8 copies")])
def test_both_divisors_of_experts_and_of_the_rest_are_told(dp, ep, copies):
    said = assumptions(estimate(MIXTRAL, Layout(dp=dp, zero=3, ep=ep)))
    assert f"ZeRO divides experts over {dp // ep}, the rest over dp x cp = {dp}" in said
    assert f"a layer's 8 experts lie on {ep} ranks, {copies} of each" in said
    assert not any(each.startswith("ZeRO divides over") for each in said)


@pytest.mark.parametrize("recompute, trips", [("none", 4), ("full", 6)])
def test_tokens_go_to_their_experts_and_back_forward_and_backward(recompute, trips):
    found = sent(MIXTRAL, dp=8, ep=4, zero=1, recompute=recompute, microbatches=2)
    size = 4096 * 2 * MIXTRAL.hidden * 2
    assert found["ep"] == {"all_to_all": pytest.approx(trips * 32 * 2 * sent_bytes("all_to_all", size, 4))}


def test_gradients_of_experts_are_reduced_among_their_copies_alone():
    found = sent(MIXTRAL, dp=8, ep=4, zero=0)
    want = sent_bytes("all_reduce", 2 * DENSE, 8) + sent_bytes("all_reduce", 2 * EXPERTS / 4, 2)
    assert found["dp"]["all_reduce"] == pytest.approx(want)


def test_each_new_axis_has_its_span_and_its_communicator():
    card = device("H100")
    fast, slow = node_of(card).intra.bandwidth, bandwidth(Layout(dp=64), card, "dp")
    assert bandwidth(Layout(dp=64, zero=3, shard_within=8), card, "shard") == fast
    assert bandwidth(Layout(dp=64, zero=3, shard_within=16), card, "shard") == slow
    assert bandwidth(Layout(dp=64, ep=8), card, "ep") == fast and bandwidth(Layout(dp=64, ep=16), card, "ep") == slow


@pytest.mark.parametrize(
    "shape, given, groups",
    [
        (LLAMA, {"dp": 64, "zero": 3}, [64]),
        (LLAMA, {"dp": 64, "zero": 3, "shard_within": 8}, [8, 8]),
        (LLAMA, {"dp": 64, "zero": 3, "shard_within": 64}, [64]),
        (LLAMA, {"dp": 64, "zero": 1, "shard_within": 1}, [64]),
        (MIXTRAL, {"dp": 64, "ep": 8}, [64, 8, 8]),
        (MIXTRAL, {"dp": 8, "ep": 8, "zero": 3}, [8, 8]),
        (MIXTRAL, {"dp": 16, "ep": 4, "tp": 2, "zero": 1}, [16, 4, 4, 2]),
        (LLAMA, {"dp": 64, "zero": 3, "zeropp": "qwz"}, [64]),
        (LLAMA, {"dp": 64, "zero": 3, "zeropp": "hpz"}, [64, 8]),
        (LLAMA, {"dp": 64, "zero": 3, "zeropp": "qgz"}, [64, 8, 8]),
        (LLAMA, {"dp": 64, "zero": 3, "zeropp": "all"}, [64, 8, 8]),
        (LLAMA, {"dp": 8, "zero": 3, "zeropp": "all"}, [8, 8]),
        (LLAMA, {"dp": 8, "tp": 8, "zero": 3, "zeropp": "all"}, [8, 8, 8]),  # a rank in each node
    ],
)
def test_each_group_in_which_something_is_sent_has_a_communicator(shape, given, groups):
    """Written out: groups by their ranks, and one of all where there are several."""
    layout = estimate(shape, Layout(**given)).layout
    assert overheads.communicators(layout) == len(groups) + (len(groups) > 1)
    assert len(sent(shape, **given)) <= len(groups)


@pytest.mark.parametrize(
    "shape, given, want",
    [
        (LLAMA, {"dp": 8, "ep": 2}, "ep 2 does not divide the 0 experts of llama-3.1-8b; 1 would do"),
        (MIXTRAL, {"dp": 3, "ep": 3}, "ep 3 does not divide the 8 experts of mixtral-8x7b; 1 would do"),
        (MIXTRAL, {"dp": 6, "ep": 4}, "ep 4 .* dp x cp = 6; 1, 2, 3 or 6 would do, or --gpus 4 .dp 4."),
        (
            LLAMA,
            {"dp": 8, "zero": 3, "shard_within": 3},
            "3 does not divide dp x cp = 8; 1, 2, 4 or 8 would do, or --gpus 3 .dp 3.",
        ),
        (LLAMA, {"dp": 8, "shard_within": 4}, "shard-within 4 needs ZeRO stage 1, 2 or 3, not 0"),
        (LLAMA, {"dp": 8, "zero": 3, "shard_within": -1}, "shard-within must be a whole number of 0 or more"),
        (MIXTRAL, {"dp": 8, "zero": 3, "shard_within": 4, "ep": 2}, "ep 1 or shard-within 0 would do"),
        (LLAMA, {"dp": 8, "zero": 3, "zeropp": "qxz"}, "zeropp is none, all, or of qwz, hpz, qgz.*not 'qxz'"),
        (LLAMA, {"dp": 8, "zero": 2, "zeropp": "all"}, "ZeRO.. needs zero 3, shard-within 0 and ep 1"),
        (
            LLAMA,
            {"dp": 12, "zero": 3, "zeropp": "hpz"},
            "per-node 8 does not divide dp x cp = 12; 1, 2, 3, 4 or 6 would do, or --gpus 8 .dp",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_values_that_would_do(shape, given, want):
    with pytest.raises(ValueError, match=want) as error:
        estimate(shape, Layout(**given))
    assert "\n" not in str(error.value)


def test_what_leaves_a_node_in_zeropp_is_a_quarter():
    plain, every = (sharding.crossing(Layout(dp=64, zero=3, zeropp=on), P) for on in ("none", "all"))
    assert sum(every.values()) * 4 == sum(plain.values()) == 3 * 2 * P
