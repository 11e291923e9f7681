"""Model states: ZeRO's Table 1 whole, three conventions, DeepSpeed's own estimators, offload, and reported problems."""

import itertools

import pytest

from labkit.cost import states
from labkit.cost.layout import Layout
from labkit.cost.memory import memory
from labkit.cost.named import named
from labkit.cost.states import deepspeed_zero2, deepspeed_zero3, per_parameter, state_bytes
from tests.problems import problem

GIB, MIB = 2**30, 2**20
# ZeRO, arXiv:1910.02054, Table 1, GB per device: dp to stages 1, 2, 3, for models of 7.5B, 128B and 1T. The paper cuts
# some last digits off instead of rounding.
TABLE_1 = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}
CELLS = [
    (size, dp, stage, cell)
    for size, rows in TABLE_1.items()
    for dp, cells in rows.items()
    for stage, cell in zip((1, 2, 3), cells, strict=True)
]


@pytest.mark.parametrize("size, dp, stage, cell", CELLS)
def test_every_cell_of_zeros_table_1(size, dp, stage, cell):
    got = state_bytes(int(size), per_parameter("zero"), stage, dp).total / 1e9
    digit = 10.0 ** -len(str(cell).partition(".")[2])
    assert cell - digit / 2 <= got < cell + digit


def test_table_1_has_54_cells():
    assert len(CELLS) == 54


@pytest.mark.parametrize(
    "convention, precision, total",
    [
        ("zero", "bf16", 16),
        ("zero", "fp16", 16),
        ("zero", "fp32", 16),
        ("megatron", "bf16", 18),
        ("megatron", "fp32", 16),
        ("deepspeed", "fp32", 16),
    ],
)
def test_bytes_per_parameter_of_the_conventions(convention, precision, total):
    assert per_parameter(convention, precision).total == total


@pytest.mark.parametrize("dp", [1, 2, 8])
def test_megatrons_distributed_optimizer_is_6_and_12_over_dp(dp):
    assert state_bytes(1000, per_parameter("megatron"), 1, dp).total == 6000 + 12 * -(-1000 // dp)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("convention", states.CONVENTIONS)
def test_among_one_rank_zero_divides_nothing(convention, stage):
    each = per_parameter(convention, "bf16", stage)
    held = state_bytes(12345, each, stage, 1)
    assert held.total == 12345 * each.total and held.host == 0


@pytest.mark.parametrize("shards", [2, 3, 64])
def test_higher_stages_never_hold_more_and_ranks_together_hold_everything(shards):
    each = per_parameter("zero")
    totals = [state_bytes(1001, each, stage, shards).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True) and totals[0] == 16016
    assert 16016 <= shards * totals[3] < 16016 + 16 * shards


@pytest.mark.parametrize("stage, offload", [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")])
@pytest.mark.parametrize("convention", states.CONVENTIONS)
def test_offload_moves_bytes_and_makes_none(convention, stage, offload):
    each = per_parameter(convention, "bf16", stage)
    stay, gone = state_bytes(1000, each, stage, 4), state_bytes(1000, each, stage, 4, offload)
    assert gone.total + gone.host == stay.total and gone.optimizer == 0
    assert (gone.parameters == 0) == (offload == "parameters")


def test_files_take_optimizer_and_parameters_and_the_host_keeps_gradients():
    """ZeRO-Infinity: 14 bytes of files for a parameter of one's part, 2 of host memory."""
    held = state_bytes(1000, per_parameter("zero"), 3, 4, "nvme")
    assert (held.parameters, held.gradients, held.optimizer) == (0, 0, 0)
    assert (held.host, held.disk) == (250 * 2, 250 * (12 + 2))
    own = state_bytes(1000, per_parameter("deepspeed", stage=3), 3, 4, "nvme")
    assert (own.host, own.disk) == (250 * 4, 250 * (12 + 2))
    everywhere = [state_bytes(1000, per_parameter("zero"), 3, 4, how) for how in ("none", "parameters", "nvme")]
    assert len({each.total + each.host + each.disk for each in everywhere}) == 1


@pytest.mark.parametrize(
    "kwargs, want",
    [
        ({"stage": 0, "offload": "optimizer"}, "needs ZeRO stage 1, 2 or 3"),
        ({"stage": 2, "offload": "parameters"}, "needs ZeRO stage 3, not 2"),
        ({"offload": "disk"}, "one of none, optimizer, parameters, nvme"),
        ({"stage": 2, "offload": "nvme"}, "offload to nvme needs ZeRO stage 3, not 2"),
        ({"stage": 4}, "one of 0, 1, 2, 3, not 4"),
        ({"shards": 0}, "shards must be 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(kwargs, want):
    with pytest.raises(ValueError, match=want):
        state_bytes(1000, per_parameter(), **kwargs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_model_just_fits(stage):
    each = per_parameter("zero")
    size = int(states.largest_parameters(32e9, each, stage, 64))
    assert 0.999 * 32e9 < state_bytes(size, each, stage, 64).total <= 32e9 + 16


def test_the_estimators_are_deepspeeds_own():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    sizes = (2851_000_000, 737_670_001)
    for size, gpus, nodes, offload in itertools.product(sizes, (1, 4, 8), (1, 3), (True, False)):
        assert deepspeed_zero2(size, gpus, nodes, offload) == zero2(size, gpus, nodes, offload)
    for size, gpus, nodes, init in itertools.product(sizes, (1, 4, 8), (1, 3), (True, False)):
        for offload, (cpu, params) in {"none": (0, 0), "optimizer": (1, 0), "parameters": (1, 1)}.items():
            got = deepspeed_zero3(size, 32_000_001, gpus, nodes, offload, init)
            assert got == zero3(size, 32_000_001, gpus, nodes, cpu, params, init)[:2]


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_the_convention_deepspeed_is_what_its_estimators_count(gpus):
    size = 8_000_000
    second, third = (state_bytes(size, per_parameter("deepspeed", "bf16", stage), stage, gpus) for stage in (2, 3))
    assert second.total == deepspeed_zero2(size, gpus, offload=False)[1]
    assert third.total == deepspeed_zero3(size, 0, gpus, offload="none")[1]
    offloaded = state_bytes(size, per_parameter("deepspeed", "bf16", 2), 2, gpus, "optimizer")
    assert offloaded.total == deepspeed_zero2(size, gpus, offload=True)[1]
    offloaded = state_bytes(size, per_parameter("deepspeed", "bf16", 3), 3, gpus, "optimizer")
    assert offloaded.total == deepspeed_zero3(size, 0, gpus, offload="optimizer")[1]


def test_b03_stage_2_holds_what_was_measured_and_stage_3_has_a_peak_above_its_states():
    measured = problem("B03")["input"]["measured_GB"]
    held = state_bytes(13_000_000_000, per_parameter("zero"), 2, 8)
    # Gradients are freed after the step. The report says neither model nor unit exactly.
    assert (held.parameters + held.optimizer) / 1e9 == pytest.approx(measured["z2_after_step"], rel=0.15)
    layout = Layout(dp=8, zero=3, seq=512)
    found = memory(named("llama-2-13b"), layout)
    assert found.total > found.parameters + found.gradients + found.optimizer and found.gathered > 0


def test_b04_the_smallest_row_of_the_estimator_is_the_largest_layer_alone():
    given = problem("B04")["input"]
    largest = given["vocab"] * given["hidden"]
    assert deepspeed_zero3(6_000_000_000, largest, 1)[1] / GIB == pytest.approx(0.769, abs=5e-4)
    assert deepspeed_zero3(6_000_000_000, largest, 1, offload="optimizer")[1] / GIB > 11


def test_b05_the_estimators_formula_before_and_after():
    given = problem("B05")["input"]
    size, gpus = given["P"], given["gpus"]
    assert states.deepspeed_zero2_before(size, gpus) / GIB == pytest.approx(15.93, abs=0.006)
    assert deepspeed_zero2(size, gpus, offload=False)[1] == int(4.25 * size)
    assert deepspeed_zero2(size, 1, offload=False)[1] == 20 * size
    assert deepspeed_zero3(size, 0, gpus, offload="none")[1] == int(2.25 * size)
    assert deepspeed_zero3(size, 0, 1, offload="none")[1] == 18 * size


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_b06_with_all_devices_in_model_parallelism_zero_saves_nothing(stage):
    given = problem("B06")["input"]
    alone, zero = (memory(named("gpt3-13b"), Layout(tp=given["mp"], zero=s, seq=2048)) for s in (0, stage))
    assert given["gpus"] == given["mp"] * given["dp"] and zero == alone


@pytest.mark.parametrize("processes, want", [(1, 474.8), (2, 237.4), (8, 59.4)])
def test_b12_measured_moments_scale_as_one_over_n_and_the_rest_stays(processes, want):
    given = problem("B12")["input"]
    each, size = per_parameter("zero", "bf16"), given["P"]
    held = state_bytes(size, each, 1, processes)
    moment = held.optimizer * (each.moments / 2) / each.optimizer
    assert moment / MIB == pytest.approx(want, abs=0.1)
    assert moment * processes / MIB == pytest.approx(given["z1"]["adam_m_MiB"], abs=1)
    assert held.parameters / MIB == pytest.approx(given["z1"]["params_MiB"], abs=1)
    assert held.gradients / MIB == pytest.approx(given["z1"]["grads_MiB"], abs=1)


@pytest.mark.parametrize("convention, kept", [("zero", 2), ("megatron", 4), ("deepspeed", 2)])
def test_offload_at_stage_1_leaves_the_gradients_and_at_stage_2_takes_them(convention, kept):
    first, second = (state_bytes(1000, per_parameter(convention), stage, 4, "optimizer") for stage in (1, 2))
    assert first.gradients == kept * 1000 and second.gradients == 0
