"""Estimates: traffic per axis, parts and their sums, what makes it fit, and layouts that cannot be."""

from dataclasses import fields, replace

import pytest

from labkit.cost import changes, comm, hardware, memory, moved, shapes
from labkit.cost.estimate import as_json, assumptions, bandwidth, estimate, node_of
from labkit.cost.layout import Layout, data_parallel, tensor_parallel
from labkit.cost.named import models, named
from labkit.cost.shapes import Shape
from tests.problems import problem

LLAMA = named("llama-3.1-8b")
P = shapes.parameters(LLAMA)


def sent(shape, stage=0, **kwargs):
    return moved.communication_bytes(shape, Layout(**kwargs), stage)


@pytest.mark.parametrize(
    "zero, microbatches, times", [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 3), (1, 4, 2), (2, 4, 5), (3, 4, 12)]
)
@pytest.mark.parametrize("n", [2, 8])
def test_zero_sends_as_many_parameters_as_its_paper_says(zero, microbatches, times, n):
    ops = sent(LLAMA, dp=n, zero=zero, microbatches=microbatches)["dp"]
    assert sum(ops.values()) == pytest.approx(times * 2 * P * (n - 1) / n, rel=1e-9)


def test_context_parallel_ranks_reduce_gradients_too():
    assert sent(LLAMA, cp=4, dp=2)["dp"] == sent(LLAMA, dp=8)["dp"]


def test_megatron_sends_its_gradients_in_fp32():
    one, other = (sent(LLAMA, dp=2, convention=name)["dp"]["all_reduce"] for name in ("zero", "megatron"))
    assert other == 2 * one


@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_layer_of_tensor_parallelism_is_four_all_reduces_or_ten_halves(t):
    deep = replace(LLAMA, layers=LLAMA.layers + 1)
    size = 2 * 4096 * LLAMA.hidden
    plain, with_sp, again = (
        sum(sent(deep, tp=t, **how)["tp"].values()) - sum(sent(LLAMA, tp=t, **how)["tp"].values())
        for how in ({"sequence_parallel": False}, {}, {"recompute": "full", "sequence_parallel": False})
    )
    assert plain == pytest.approx(4 * comm.sent_bytes("all_reduce", size, t))
    assert with_sp == pytest.approx(10 * (t - 1) / t * size)
    assert again == pytest.approx(6 * comm.sent_bytes("all_reduce", size, t))


def test_the_loss_and_both_ends_of_the_model_are_counted():
    none = Shape("flat", 1, 512, 8, 8, 64, 2048, 1000)
    found = sent(none, tp=2, sequence_parallel=False)["tp"]["all_reduce"]
    size, tokens = 2 * 4096 * 512, 4096
    assert found == (4 + 2) * size + 3 * 4 * tokens


@pytest.mark.parametrize("p, v, m", [(2, 1, 4), (4, 1, 8), (4, 2, 8), (8, 4, 8)])
def test_all_stages_together_send_every_boundary_twice(p, v, m):
    layout = {"pp": p, "interleave": v, "microbatches": m}
    total = sum(sent(LLAMA, stage, **layout)["pp"]["send"] for stage in range(p))
    assert total == (p * v - 1) * 2 * m * 2 * 4096 * LLAMA.hidden


def test_a_tied_head_reduces_its_gradient_between_first_and_last_stage():
    small = named("llama-3.2-1b")
    found = [sent(small, stage, pp=4).get("pp", {}).get("all_reduce", 0) for stage in range(4)]
    assert found == [2 * small.vocab * small.hidden, 0, 0, 2 * small.vocab * small.hidden]


def test_context_parallelism_moves_keys_and_values_three_times():
    found = sent(LLAMA, cp=4, seq=8192)["cp"]
    size = 2 * 8192 * 2 * LLAMA.kv_width * LLAMA.layers * 3 / 4
    assert found == {"all_gather": 2 * size, "reduce_scatter": size}


def test_offload_moves_four_bytes_per_parameter_of_its_own():
    found = sent(LLAMA, dp=4, zero=2, offload="optimizer")["host"]
    assert sum(found.values()) == pytest.approx(4 * P / 4, abs=4)


def test_one_device_sends_nothing():
    assert sent(LLAMA) == {}


@pytest.mark.parametrize("shape", models(), ids=lambda shape: shape.name)
def test_an_estimate_of_every_named_model_adds_up(shape):
    tp = max(each for each in tensor_parallel(shape) if each <= 8)
    layout = Layout(dp=2, tp=tp, pp=2, zero=1, microbatches=4, seq=960)
    found = as_json(estimate(shape, layout, "H200"))
    held = found["memory_bytes"]
    assert held["total"] == sum(size for name, size in held.items() if name != "total")
    assert held["activations"] == sum(found["activation_bytes"].values())
    assert held["buffers"] == sum(found["buffer_bytes"].values())
    assert found["needed_bytes"] == held["total"] + sum(found["overhead_bytes"].values())
    assert found["free_bytes"] == found["device_bytes"] - found["needed_bytes"]
    assert found["fits"] == (found["free_bytes"] >= 0)
    assert set(found["communication_bytes"]) == ({"dp", "tp", "pp"} if tp > 1 else {"dp", "pp"})
    assert found["parameters"] == shapes.parameters(shape) and all(found["assumptions"])


@pytest.mark.parametrize("pp, v, m", [(4, 1, 1), (4, 1, 16), (8, 2, 8), (16, 1, 32), (8, 4, 16), (3, 1, 3), (7, 1, 9)])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-xl", "qwen3-0.6b"])
def test_the_fullest_stage_is_the_fullest_of_all(name, pp, v, m):
    shape = named(name) if v == 1 else replace(named(name), layers=3 * pp * v)
    for zero in (0, 3):
        layout = Layout(dp=2, pp=pp, interleave=v, microbatches=m, seq=1024, zero=zero)
        held = [memory.memory(shape, layout, stage).total for stage in range(pp)]
        assert memory.memory(shape, layout).total == max(held)


TIGHT = (
    ("llama-3.1-8b", {}, "H100"),
    ("llama-3.1-8b", {"dp": 8}, "A100-40"),
    ("llama-3.1-8b", {"dp": 8, "zero": 2, "micro_batch": 8}, "H100"),
    ("llama-3.1-70b", {"dp": 8, "tp": 8, "flash": False, "sequence_parallel": False}, "A100-80"),
    ("gpt2-xl", {"seq": 1024, "precision": "fp16", "micro_batch": 6}, "T4"),
    ("mixtral-8x7b", {"dp": 4, "tp": 2, "pp": 2, "microbatches": 2, "activations": "eager"}, "H100"),
    ("mixtral-8x7b", {"dp": 16, "zero": 1}, "H100"),
    ("llama-3.1-70b", {"dp": 64, "zero": 3, "shard_within": 8}, "A100-80"),
    ("llama-3.1-70b", {"dp": 16, "zero": 3, "zeropp": "all"}, "H100"),
    ("llama-3.1-405b", {"dp": 4, "tp": 8, "pp": 16, "microbatches": 16, "seq": 8192}, "H100"),
)


@pytest.mark.parametrize("name, given, device", TIGHT)
def test_three_changes_are_offered_and_each_fits(name, given, device):
    before = estimate(named(name), Layout(**given), device)
    assert not before.fits
    found = changes.cheapest(before)
    assert len(found) == 3
    for change in found:
        assert change.result.fits and change.options
        after = change.result.layout
        assert estimate(named(name), after, device) == change.result
        same = {"seq", "precision", "convention", "activations", "bucket", "interleave"}
        assert all(getattr(after, field) == getattr(before.layout, field) for field in same)
        assert after.tokens >= before.layout.tokens
    order = [(max(0, c.result.layout.gpus - before.layout.gpus), c.result.gpu_time_s) for c in found]
    assert order == sorted(order)
    kinds = [changes.changed(before.layout, c.result.layout) for c in found]
    assert not any(kinds[i] <= kinds[j] for i in range(3) for j in range(i + 1, 3))


def test_what_fits_needs_no_change():
    assert changes.cheapest(estimate(named("gpt2"), Layout(seq=1024), "A100-80")) == ()


def test_a_device_too_small_for_a_single_layer_is_told_so():
    huge = replace(LLAMA, name="huge", hidden=2**22, ffn=2**24, heads=7, kv_heads=7, head_dim=2**20)
    tiny = estimate(huge, Layout(precision="fp16"), "T4")
    assert changes.cheapest(tiny) == ()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_among_one_rank_the_assumptions_say_that_zero_divides_nothing(zero):
    found = estimate(LLAMA, Layout(tp=8, zero=zero))
    assert any("divides nothing" in each for each in assumptions(found))
    assert not any("divides nothing" in each for each in assumptions(estimate(LLAMA, Layout(dp=8, zero=zero))))


def test_b13_offload_saves_memory_and_costs_time_in_the_measured_order():
    measured = problem("B13")["input"]["measured"]
    falcon = Shape("falcon-7b", 32, 4544, 71, 1, 64, 4 * 4544, 65024, gated=False, tied=True)
    given = {"dp": 8, "micro_batch": 1, "recompute": "full", "seq": 4096}
    kinds = {"z2": (2, "none"), "z2_off": (2, "optimizer"), "z3": (3, "none"), "z3_offall": (3, "parameters")}
    found = {
        kind: estimate(falcon, Layout(zero=zero, offload=offload, **given), "A100-40")
        for kind, (zero, offload) in kinds.items()
    }
    size = {kind: each.memory.total for kind, each in found.items()}
    time_s = {kind: each.gpu_time_s for kind, each in found.items()}
    assert measured["z2"] == "OOM" and size["z2"] == max(size.values())
    assert measured["z3_offall"][0] < measured["z3"][0] and size["z3_offall"] < size["z3"]
    for fast, slow in (("z3", "z2_off"), ("z2_off", "z3_offall")):
        assert measured[fast][1] < measured[slow][1] and time_s[fast] < time_s[slow]


@pytest.mark.parametrize(
    "gpus, axes, want", [(8, (3, 1, 1), "6 or 9"), (1, (2, 1, 1), "; 2 would"), (7, (2, 2, 1), "4 or 8")]
)
def test_gpus_that_are_no_product_of_the_axes_are_told_which_are(gpus, axes, want):
    with pytest.raises(ValueError, match=want) as error:
        data_parallel(gpus, *axes)
    assert "\n" not in str(error.value)
    assert data_parallel(24, 2, 3, 1) == 4


BAD = (
    ({"tp": 3}, "tp 3 does not divide the 32 heads.*1, 2, 4, 8, 16 or 32 would do"),
    ({"tp": 64}, "1, 2, 4, 8, 16 or 32 would do"),
    ({"pp": 33, "microbatches": 33}, "pp 33 is more than the 32 layers.*1 to 32 would do"),
    ({"pp": 8, "interleave": 8, "microbatches": 8}, "more than the 32 layers"),
    ({"pp": 2, "interleave": 3, "microbatches": 2}, "interleave 1, 2, 4, 8 or 16 would do"),
    ({"pp": 4, "interleave": 2, "microbatches": 6}, "microbatches in multiples.*8 would do"),
    ({"cp": 3, "seq": 4096}, "3 parts .cp 3.; 4095, 4098 or cp 1 would do"),
    ({"tp": 8, "seq": 4100}, "8 parts .cp 1 x tp 8 with sequence parallelism.; 4096, 4104 or no sequence par"),
    ({"seq": 0}, "seq must be a whole number of 1 or more, not 0"),
    ({"micro_batch": -1}, "micro-batch must be"),
    ({"zero": 5}, "ZeRO stage must be one of 0, 1, 2, 3, not 5"),
    ({"recompute": "some"}, "recompute must be one of none, selective, full, not 'some'"),
    ({"precision": "int8"}, "precision must be one of bf16, fp16, fp32"),
    ({"offload": "optimizer"}, "needs ZeRO stage 1, 2 or 3"),
    ({"offload": "disk"}, "offload must be one of"),
    ({"convention": "other"}, "convention must be one of zero, megatron, deepspeed"),
    ({"activations": "other"}, "activations must be one of megatron, eager"),
)


@pytest.mark.parametrize("given, want", BAD)
def test_a_layout_that_cannot_be_is_one_line_with_values_that_would_do(given, want):
    with pytest.raises(ValueError, match=want) as error:
        estimate(LLAMA, Layout(**given))
    assert "\n" not in str(error.value)


def test_learned_positions_bound_the_sequence():
    with pytest.raises(ValueError, match="gpt2 has 1024 positions, too few for seq 4096"):
        estimate(named("gpt2"), Layout())


@pytest.mark.parametrize("device, want", [("T4", "no arithmetic in bf16; it has fp32, fp16"), ("H900", "known: ")])
def test_an_unknown_device_or_one_without_the_precision_is_told(device, want):
    with pytest.raises(ValueError, match=want):
        estimate(LLAMA, Layout(), device)


@pytest.mark.parametrize("field", [each.name for each in fields(Layout) if each.type == "int"])
def test_no_size_of_a_layout_may_be_a_fraction(field):
    with pytest.raises(ValueError):
        Layout(**{field: 1.5})


@pytest.mark.parametrize("microbatches", [1, 4])
def test_offload_moves_a_ranks_part_for_each_microbatch_that_needs_it(microbatches):
    part = -(-P // 4)
    given = {"dp": 4, "microbatches": microbatches}
    first = sent(LLAMA, zero=1, offload="optimizer", **given)["host"]
    second = sent(LLAMA, zero=2, offload="optimizer", **given)["host"]
    third = sent(LLAMA, zero=3, offload="parameters", **given)["host"]
    assert first == {"to_host": 2 * part, "to_device": 2 * part}
    assert second == {"to_host": 2 * part * microbatches, "to_device": 2 * part}
    assert third == {"to_host": 2 * part * microbatches, "to_device": 2 * 2 * part * microbatches}


def test_a_part_of_the_sequence_is_a_part_of_what_a_stage_sends_on():
    whole, part = (sent(LLAMA, pp=2, cp=cp)["pp"]["send"] for cp in (1, 4))
    assert whole == 4 * part == 2 * 4096 * LLAMA.hidden


def test_full_recomputation_gathers_keys_and_values_once_more():
    once, again = (sent(LLAMA, cp=4, recompute=how)["cp"] for how in ("none", "full"))
    assert again["all_gather"] * 2 == once["all_gather"] * 3 and again["reduce_scatter"] == once["reduce_scatter"]


def test_the_time_of_layouts_is_products_at_the_peak_bubbles_and_bytes_on_their_wires():
    alone = estimate(LLAMA, Layout(), "H100")
    assert alone.gpu_time_s == pytest.approx(alone.hardware_flops / 989.4e12 / 4096)
    given = {"pp": 4, "microbatches": 8}
    piped = estimate(LLAMA, Layout(**given), "H100")
    moving_s = sum(piped.communication["pp"].values()) / 450e9
    busy_s = piped.hardware_flops / 4 / 989.4e12
    assert piped.gpu_time_s == pytest.approx((busy_s * (1 + 3 / 8) + moving_s) * 4 / piped.layout.tokens)


@pytest.mark.parametrize("axis, layout, share", [("tp", {"tp": 8}, 1), ("dp", {"dp": 8}, 1), ("dp", {"dp": 16}, 1 / 8)])
def test_an_axis_that_leaves_the_node_has_its_share_of_the_network_cards(axis, layout, share):
    box = node_of(hardware.device("H100"))
    want = box.intra.bandwidth if share == 1 else box.nic.bandwidth * box.num_nics * share
    assert bandwidth(Layout(**layout), box.device, axis) == want


def test_fewer_cards_than_devices_are_shared():
    box = node_of(hardware.device("T4"))
    assert box.num_nics < box.count
    assert bandwidth(Layout(dp=16), box.device, "dp") == box.nic.bandwidth * box.num_nics / box.count


@pytest.mark.parametrize("recompute, more", [("none", 0), ("selective", 0), ("full", 1 / 3)])
def test_flash_attention_has_nothing_to_recompute_selectively(recompute, more):
    found = estimate(LLAMA, Layout(recompute=recompute))
    assert found.hardware_flops / found.model_flops - 1 == pytest.approx(more, abs=0.03)
    assert (found.hardware_flops == found.model_flops) == (more == 0)


def test_the_loss_keeps_three_copies_of_the_logits_in_eager_and_one_in_megatron():
    tokens, rows = 4096, 4 * 4096 * LLAMA.vocab
    eager, megatron = (memory.memory(LLAMA, Layout(activations=name)).logits for name in ("eager", "megatron"))
    norm = tokens * (4 * LLAMA.hidden + 4 + 2 * 2 * LLAMA.hidden)
    assert eager == 3 * rows + norm + 8 * tokens + 4
    assert megatron == rows + 4 * tokens * LLAMA.hidden


def test_the_vocabulary_is_padded_for_each_rank():
    odd = named("gpt2-xl")
    assert odd.vocab % 5
    held = shapes.stage_parameters(odd, 5, 2, 0) - shapes.stage_layers(48, 2)[0] * shapes.rank_layer_parameters(odd, 5)
    assert held == (-(-odd.vocab // 5) + odd.positions) * odd.hidden


def test_active_experts_multiply_what_an_mlp_keeps():
    mixtral = named("mixtral-8x7b")
    dense = replace(mixtral, experts=0, active_experts=0)
    s, b = 1024, 1
    extra = memory.memory(mixtral, Layout(seq=s)).layers - memory.memory(dense, Layout(seq=s)).layers
    assert extra == 32 * s * b * (2 * 2 * mixtral.hidden + 2 * 4 * mixtral.ffn)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_files_are_read_and_written_once_a_step_but_for_parameters_that_come_up(microbatches):
    part = -(-P // 4)
    found = sent(LLAMA, dp=4, zero=3, offload="nvme", microbatches=microbatches)
    assert found["disk"] == {"read": part * (12 + 2 * 2 * microbatches), "write": part * (12 + 2)}
    assert found["host"] == sent(LLAMA, dp=4, zero=3, offload="parameters", microbatches=microbatches)["host"]
    said = assumptions(estimate(LLAMA, Layout(dp=4, zero=3, offload="nvme")))
    assert any(f"{part * 14 / 2**30:.2f} GiB of files" in each for each in said)
