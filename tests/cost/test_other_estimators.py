"""DeepSpeed's and accelerate's estimators beside ours, in one table: where they agree to the byte, and why they differ.

Their figures stand in tests/data/other_estimators.json with versions and command; `other_estimators` made them.
"""

import json
from pathlib import Path

import pytest

from labkit.cost import config, memory, shapes, states
from labkit.cost.estimate import estimate
from labkit.cost.layout import Layout
from labkit.cost.named import named
from tests.cost import measured, other_estimators

FOUND = json.loads(other_estimators.TO.read_text())
MODELS = FOUND["models"]
SHAPES = {name: config.shape_of(found["config"]) for name, found in MODELS.items()}
DEEPSPEED = [(name, row) for name, found in MODELS.items() for row in found["deepspeed"]]
GIB = 2**30


def words(case):
    name, row = case
    return f"{name}.z{row['stage']}.{row['per_node']}x{row['nodes']}.{row['offload']}.{row.get('zero_init', '')}"


def test_the_file_says_versions_and_command():
    assert set(FOUND["versions"]) == {"deepspeed", "accelerate", "transformers", "torch"}
    assert FOUND["command"] == other_estimators.COMMAND and Path(other_estimators.__file__).is_file()
    assert {name: found["config"] for name, found in MODELS.items()} == other_estimators.CONFIGS


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_transformers_builds_are_ours_to_the_digit(name):
    assert MODELS[name]["parameters"] == shapes.parameters(SHAPES[name]) == shapes.parameters(named(name))


@pytest.mark.parametrize("case", DEEPSPEED, ids=words)
def test_deepspeeds_figures_come_out_to_the_byte(case):
    name, row = case
    count, layer, where = MODELS[name]["parameters"], MODELS[name]["largest_module"], (row["per_node"], row["nodes"])
    if row["stage"] == 2:
        ours = states.deepspeed_zero2(count, *where, offload=row["offload"] == "optimizer")
    else:
        ours = states.deepspeed_zero3(count, layer, *where, offload=row["offload"], zero_init=row["zero_init"])
    assert ours == (row["host"], row["device"])


@pytest.mark.parametrize("case", [case for case in DEEPSPEED if case[1]["offload"] == "none"], ids=words)
def test_our_states_differ_from_deepspeeds_by_its_largest_module_alone(case):
    """Stage 3 adds 4 bytes for each parameter of the largest module; ours has what is gathered as a buffer."""
    name, row = case
    ranks = row["per_node"] * row["nodes"]
    layout = Layout(dp=ranks, zero=row["stage"], convention="deepspeed", seq=1024)
    held = memory.memory(SHAPES[name], layout)
    ours = held.parameters + held.gradients + held.optimizer
    extra = 4 * MODELS[name]["largest_module"] if row["stage"] == 3 else 0
    assert ours == pytest.approx(row["device"] - extra, abs=24)


def test_deepspeed_counts_the_same_on_a_device_with_offloaded_parameters_whatever_the_ranks():
    for name in MODELS:
        rows = [row for each, row in DEEPSPEED if each == name and row["offload"] == "parameters"]
        assert {row["device"] for row in rows} == {4 * MODELS[name]["largest_module"]}


@pytest.mark.parametrize("name", MODELS)
def test_accelerates_parts_add_up_to_ours_but_it_prints_the_largest_of_them(name):
    """16 bytes a parameter in fp32, 18 in mixed precision (Megatron's); printed are 16 and 8."""
    found, count = MODELS[name]["accelerate"], MODELS[name]["parameters"]
    parts = {dtype: [size[key] for key in ("model", "gradients", "optimizer")] for dtype, size in _training(found)}
    assert sum(parts["float32"]) == pytest.approx(states.per_parameter("zero", "fp32").total * count, rel=1e-6)
    assert sum(parts["bfloat16"]) == pytest.approx(states.per_parameter("megatron", "bf16").total * count, rel=1e-6)
    printed = {dtype: max(size.values()) / count for dtype, size in _training(found)}
    assert printed["float32"] == pytest.approx(16, rel=1e-6) and printed["bfloat16"] == pytest.approx(8, rel=1e-6)


def _training(found):
    return [(dtype, size) for dtype, size in found["training"].items()]


@pytest.mark.parametrize("name", MODELS)
def test_accelerate_counts_buffers_too(name):
    """transformers' rotary frequencies: half a head's size, twice, in fp32; GPT-2 has none."""
    found, shape = MODELS[name]["accelerate"], SHAPES[name]
    buffers = 0 if shape.positions else 2 * shape.head_dim // 2 * 4
    assert found["total_size"] == 4 * MODELS[name]["parameters"] + buffers


def test_one_table_and_only_ours_is_near_a_run_that_was_measured():
    """Llama 3.1 8B on 8 devices, sharded, under torchtitan: the other two count no activations, logits or gaps."""
    rows = []
    for name in MODELS:
        three = next(r for each, r in DEEPSPEED if each == name and (r["stage"], r["nodes"]) == (3, 1))
        ours = estimate(SHAPES[name], Layout(dp=8, zero=3, seq=1024, convention="deepspeed"), "H100")
        printed = max(MODELS[name]["accelerate"]["training"]["bfloat16"].values())
        rows.append((name, three["device"], printed, ours.memory.total, ours.needed_bytes))
    print(f"{'GiB, 8 devices, ZeRO 3':24}{'DeepSpeed':>12}{'accelerate':>12}{'ours: parts':>12}{'needed':>12}")
    for name, *sizes in rows:
        print(f"{name:24}" + "".join(f"{size / GIB:12.2f}" for size in sizes))
    run = next(row for row in measured.rows() if row["id"] == "titan24.8b.8g.fsdp+compile.mem")
    others = [size / GIB for name, *sizes in rows if name == "llama-3.1-8b" for size in sizes[:2]]
    took = measured.measured(run)
    print(f"measured {took}; DeepSpeed, accelerate (which knows no shards): {others}; ours {measured.estimated(run)}")
    assert abs(measured.estimated(run) / took - 1) < 0.1
    assert all(other < 0.8 * took for other in others)
