"""Lab 04's recorded steps: states, traffic and losses of every stage are those of the formulas, to the byte.

The classes recorded are the notebook's own solutions. DeepSpeed's tests wait for DeepSpeed.
"""

import importlib.util

import pytest

from labkit.cost import claims, memory
from labkit.cost.layout import Layout
from labkit.labs import lab04
from labkit.labs.lab04 import engines, pictures, recorded
from slides import cells

pytestmark = pytest.mark.timeout(300)
RANKS = 4
NAMES = {1: "ZeroOptimizer", 2: "ZeroGradients", 3: "ZeroParameters"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="waits for deepspeed: pip install deepspeed"
)


@pytest.fixture(scope="module")
def steps():
    """By stage, the notebook's own classes; 0 is DDP."""
    own = {stage: lab04.record(f"stage {stage}", cells.function("04", name)) for stage, name in NAMES.items()}
    return {0: lab04.record("DDP", lab04.ddp_way)} | own


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_those_of_the_formula_but_for_padding(steps, stage):
    due = pictures.by_formula(stage, RANKS)
    for kind, num_bytes in steps[stage].states().items():
        assert num_bytes / steps[stage].parameters == pytest.approx(due[kind], rel=0.01), kind


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_traffic_is_that_of_the_formula(steps, stage):
    assert steps[stage].sent_elements == pytest.approx(claims.communication(stage, 1, RANKS), rel=1e-3)
    due = {0: {"all_reduce"}, 1: {"reduce_scatter", "all_gather"}}
    assert set(steps[stage].moved) == due.get(stage, due[1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_are_those_of_one_worker(steps, stage):
    assert steps[stage].losses == pytest.approx(lab04.serial_losses(RANKS), rel=1e-5)


def test_with_k_microbatches_stage_2_sends_k_plus_1_times_and_losses_stay():
    cls = cells.function("04", "ZeroGradients")
    step = lab04.record("3 microbatches", cls, world_size=2, microbatches=3)
    assert step.sent_elements == pytest.approx(claims.communication(2, 3, 2), rel=1e-3)
    assert step.losses == pytest.approx(lab04.serial_losses(6), rel=1e-5)  # as many rows in one batch


def test_fsdp_sends_less_than_3_for_its_root_is_not_gathered_again():
    step = lab04.record("FSDP2", lab04.fsdp_way)
    root = 2 * 256 * 256 + 256  # embedding, head, and the last norm
    assert step.sent_elements * RANKS / (RANKS - 1) == pytest.approx(3 - root / step.parameters, rel=1e-3)
    assert step.losses == pytest.approx(lab04.serial_losses(RANKS), rel=1e-5)


def test_the_most_of_a_kind_is_at_least_what_is_held_when_backward_ends(steps):
    for step in steps.values():
        for kind in ("parameters", "gradients", "optimizer"):
            assert step.most(kind) >= step.states()[kind] > 0
        assert sum(step.held("peak").values()) >= sum(step.held("end").values())


def test_a_way_stays_as_it_is_and_a_class_gets_one():
    assert recorded.way_of(lab04.ddp_way) is lab04.ddp_way
    assert callable(recorded.way_of(lab04.TorchZero))


STAND_INS = {1: lab04.TorchZero, 2: lab04.kept_way, 3: lab04.freed_way}


@pytest.mark.parametrize("stage", STAND_INS)
def test_what_stands_in_for_a_stub_trains_as_one_worker_does_and_sends_what_is_due(stage):
    step = lab04.record("stand-in", STAND_INS[stage])
    assert step.losses == pytest.approx(lab04.serial_losses(RANKS), rel=1e-5)
    assert step.sent_elements == pytest.approx(claims.communication(stage, 1, RANKS), rel=1e-3)
    due = pictures.by_formula(stage, RANKS)
    due["parameters"] += 4 / RANKS if stage == 2 else 0  # FSDP2's own part, beside the whole
    for kind, num_bytes in step.states().items():
        assert num_bytes / step.parameters == pytest.approx(due[kind], rel=0.01), kind


def test_with_microbatches_the_stand_in_of_stage_2_gathers_once():
    step = lab04.record("stand-in", lab04.kept_way, microbatches=4)
    assert step.sent_elements == pytest.approx(claims.communication(2, 4, RANKS), rel=1e-3)
    assert step.losses == pytest.approx(lab04.serial_losses(4 * RANKS), rel=1e-5)  # as many rows in one batch


# DeepSpeed


@needs_deepspeed
def test_the_experiment_prints_torchs_and_deepspeeds_stages(capsys):
    lab04.stages()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[3:]] == [
        "DDP", "FSDP2", *(f"DeepSpeed, stage {stage}" for stage in range(4))
    ]  # fmt: skip
    assert "2.000" in lines[3] and "3.000" in lines[6]


@pytest.mark.parametrize("experiment", [lab04.stages, lab04.switches])
def test_an_experiment_of_one_rank_is_refused_with_what_would_do(experiment):
    with pytest.raises(ValueError, match="world_size=2 would do"):
        experiment(1)


@pytest.fixture(scope="module")
def deepspeeds():
    every = {f"stage {stage}": engines.config(stage) for stage in range(4)}
    every["default"] = engines.config(2, reduce_bucket_size=engines.DEFAULT_BUCKET)
    every["overlap"] = engines.config(2, overlap_comm=True)
    every["owners"] = engines.config(2, use_multi_rank_bucket_allreduce=False)
    return engines.record(every)


@needs_deepspeed
def test_deepspeeds_losses_are_those_of_one_worker_whatever_the_configuration(deepspeeds):
    due = lab04.serial_losses(2)
    for name, step in deepspeeds.items():
        assert step.losses == pytest.approx(due, rel=1e-5), name


@needs_deepspeed
@pytest.mark.parametrize(("stage", "sent"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_deepspeed_on_gloo_all_reduces_at_stages_1_and_2(deepspeeds, stage, sent):
    step = deepspeeds[f"stage {stage}"]
    assert step.sent_elements * 2 == pytest.approx(sent, rel=1e-3)
    assert ("all_reduce" in step.moved and step.moved["all_reduce"][1] > 1000) == (stage < 3)
    assert ("reduce_scatter" in step.moved) == (stage == 3)


@needs_deepspeed
@pytest.mark.parametrize(("stage", "optimizer"), [(0, 8), (1, 6), (2, 6), (3, 6)])
def test_deepspeed_keeps_a_master_copy_of_fp32_parameters(deepspeeds, stage, optimizer):
    step = deepspeeds[f"stage {stage}"]
    assert step.states()["optimizer"] / step.parameters == pytest.approx(optimizer, rel=0.01)


@needs_deepspeed
def test_the_default_bucket_is_as_large_as_the_cost_model_says(deepspeeds):
    step = deepspeeds["default"]
    due = memory.bucket_bytes(Layout(dp=2, zero=2, precision="fp32", convention="deepspeed"), step.parameters)
    assert due == 4 * engines.DEFAULT_BUCKET
    assert due <= step.most("buffers") <= 1.01 * due + 4 * step.parameters
    assert step.most("buffers") > 16 * step.parameters  # more than all that DDP keeps


@needs_deepspeed
def test_overlap_takes_a_second_bucket_and_owners_are_reduced_to(deepspeeds):
    more = deepspeeds["overlap"].most("buffers") - deepspeeds["stage 2"].most("buffers")
    assert more == pytest.approx(4 * engines.BUCKET, rel=0.05)
    assert "reduce" in deepspeeds["owners"].moved and deepspeeds["owners"].sent_elements == pytest.approx(1, rel=1e-3)


@needs_deepspeed
def test_the_table_of_switches_has_a_line_for_each_with_calls_and_buckets(deepspeeds):
    from labkit.cost import hardware

    lines = pictures.switches_table(deepspeeds, hardware.cluster("T4", per_node=2)).splitlines()
    assert len(lines) == 2 + len(deepspeeds)
    calls, num_bytes = deepspeeds["owners"].moved["reduce"]
    assert f"{calls} reduce, {num_bytes / 1e6:.1f} MB" in lines[-1]
    assert f"{deepspeeds['default'].most('buffers') / 1e6:,.1f} MB" in lines[6]
