"""Lab 06 whole: tensor, sequence and context parallel training on real text equals serial, by stand-ins and answers.

The answers are those of tests/mistakes that must pass. --soak trains on every number of ranks, else a sample is tried.
"""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from labkit.classroom import prove
from labkit.labs import lab06
from labkit.labs.lab06 import pictures, torchs, training

STEPS = 10
X = training.BATCH * training.LENGTH * training.SIZES["hidden"] * 4
TOKENS = training.BATCH * training.LENGTH * 4


@pytest.fixture(scope="module")
def serial():
    return lab06.serial(STEPS)


@pytest.fixture(scope="module")
def right():
    """The first right answer of each exercise."""
    return {name: answers[0] for name, answers in _mistakes().RIGHT.items()}


def _mistakes():
    return prove.load(Path(__file__).parents[1] / "mistakes" / "lab06.py")


def _parts(right):
    names = {"column": "6.1", "row": "6.1b", "f": "6.2", "g": "6.2b", "attention": "6.3", "embedding": "6.4"}
    return lab06.Parts(**{name: right[number] for name, number in names.items()}, cross_entropy=right["6.4b"])


def equals(trained, serial):
    return max(lab06.differences(trained, serial).values()) <= 1e-5


def test_losses_fall_on_real_text(serial):
    assert len(serial.losses) == STEPS and serial.losses[-1] < 0.75 * serial.losses[0]


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_by_stand_ins_equals_serial_with_two_all_reduces_each_way(tp, serial):
    trained = lab06.train(tp=tp, steps=STEPS)
    assert equals(trained, serial)
    layers = pictures.layer_calls(trained)
    for phase in ("forward", "backward"):
        calls = [call.op for call in layers if call.phase == phase]
        assert calls == ["all_reduce"] * 2 * training.SIZES["layers"]
    others = [call for call in trained.calls if call not in layers]
    sizes = {phase: sorted(c.num_bytes for c in others if c.phase == phase) for phase in ("forward", "backward")}
    assert sizes["forward"] == [TOKENS] * 3 + [X]  # the loss, the embedding
    shared = [training.SIZES["hidden"] * training.SIZES["hidden"] // training.SIZES["heads"] * 4] * 4 if tp == 4 else []
    assert sizes["backward"] == sorted([*shared, X])  # shared KV heads' weights, the head's input


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_by_answers_equals_serial(tp, serial, right, soak):
    if tp == 2 and not soak:
        pytest.skip("a sample; --soak has all")
    assert equals(lab06.train(_parts(right), tp, STEPS), serial)


@pytest.mark.parametrize(
    ("tp", "keep", "own"),
    [(2, True, False), (4, False, True), (2, False, True), (4, True, True), (2, True, True), (4, False, False)],
)
def test_sequence_parallel_equals_serial(tp, keep, own, serial, right, soak):
    if (tp, keep, own) not in ((2, True, False), (4, False, True)) and not soak:
        pytest.skip("a sample; --soak has all")
    assert equals(lab06.train_sequence(right["6.5"] if own else None, tp, STEPS, keep), serial)


@pytest.mark.parametrize(("cp", "own"), [(2, False), (4, True), (2, True), (4, False)])
def test_context_parallel_equals_serial(cp, own, serial, right, soak):
    if (cp, own) not in ((2, False), (4, True)) and not soak:
        pytest.skip("a sample; --soak has all")
    assert equals(lab06.train_ring(right["6.6"] if own else None, cp, STEPS), serial)


@pytest.fixture(scope="module")
def variants(right):
    """By right answers, on two ranks; 6.5's by checkpoint, as the first one keeps gate and up put together."""
    return pictures.variants(_mistakes().RIGHT["6.5"][1], _parts(right), tp=2)


def test_gathering_again_costs_ten_eighths_of_the_bytes(variants):
    plain, kept, again = variants
    share = 1 / 2
    assert plain.calls == (("all_reduce", 4),) and plain.sent_bytes == 8 * share * X
    assert dict(kept.calls) == {"all_gather": 4, "reduce_scatter": 4} and kept.sent_bytes == 8 * share * X
    assert dict(again.calls) == {"all_gather": 6, "reduce_scatter": 4} and again.sent_bytes == 10 * share * X


def test_a_layer_keeps_norms_whole_in_tensor_parallel_and_all_over_t_in_sequence_parallel(variants):
    sizes, t = training.SIZES, 2
    tokens, hidden = training.BATCH * training.LENGTH, training.SIZES["hidden"]
    norms = 2 * tokens * (3 * 4 * hidden + 4)  # input, normalised and scaled, and 1/rms
    regions = tokens * (4 * 4 * hidden + 4 * sizes["heads"] + 4 * 4 * sizes["ffn"])  # q, k, v, output, lse; four wide
    gathered = 2 * 4 * tokens * hidden  # what q, k and v take, and gate and up
    due = [norms + regions / t, norms / t + regions / t + gathered * (t - 1) / t, norms / t + regions / t]
    assert [each.formula_bytes for each in variants] == due
    lists = 4 * 16  # a DTensor's mesh holds the numbers of its ranks; attention in sequence parallel has them
    assert all(0 <= each.kept_bytes - one <= lists for each, one in zip(variants, due, strict=True))
    assert variants[0].kept_bytes == due[0], "all by hand, so to the byte"


@pytest.mark.parametrize(("with_input", "backward"), [(False, 5), (True, 2)])
def test_torchs_own_plan_reduces_five_times_backward_unless_told_to_do_so_once(with_input, backward, serial):
    trained = torchs.torchs(2, with_input, 2)
    assert torchs.layer_calls(trained) == {"forward": 2, "backward": backward}
    assert trained.losses == pytest.approx(serial.losses[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lab06.train(tp=3), "tp is 2 or 4 here"),
        (lambda: lab06.train_ring(cp=8), "cp is 2 or 4 here"),
        (lambda: lab06.serial(0), "steps is a whole number"),
        (lambda: torchs.torchs(4), "cannot share a KV head"),
        (lambda: lab06.autotp(4), "the model has 2 KV heads"),
    ],
)
def test_what_cannot_be_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_deepspeed_cuts_linear_layers_and_reduces_five_times_backward(soak):
    if not soak:
        pytest.skip("starting DeepSpeed takes seconds: --soak")
    pytest.importorskip("deepspeed")
    from labkit.labs.lab06 import engines

    found = engines.autotp(2, 2)
    cut = {name.split(".")[-2] for name, whole, own in found.shapes if whole != own}
    assert cut >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    calls = [call for call in found.calls if call.op == "all_reduce" and call.num_bytes == X]
    assert sum(call.phase == "forward" for call in calls) == 2 * training.SIZES["layers"]
    assert sum(call.phase == "backward" for call in calls) == 5 * training.SIZES["layers"] + 1
    assert found.losses == pytest.approx(found.serial_losses, rel=1e-5)


def test_a_mask_of_ones_own_belongs_inside_a_region_and_one_for_all_outside():
    from labkit.labs.lab06 import dropout

    right, repeated = dropout.masks(True, False), dropout.masks(False, True)
    assert 0.45 < right.alike < 0.55 and right.apart == 0.0
    assert repeated.alike == 1.0 and repeated.apart > 0.5
    with pytest.raises(ValueError, match="tp divides 256"):
        dropout.masks(True, True, 3)


def _rows(table):
    """Cells of a table's rows; two spaces or more lie between them."""
    return [re.split(r"\s{2,}", line) for line in table.splitlines()[2:]]


def test_a_table_of_variants_has_their_calls_and_bytes(variants):
    for row, each in zip(_rows(pictures.variants_table(variants)), variants, strict=True):
        assert row[0] == each.name and row[1] == ", ".join(f"{count} {op}" for op, count in each.calls)
        sizes = [float(cell.replace(",", "")) for cell in row[2:]]
        assert sizes == [each.sent_bytes, each.kept_bytes, each.formula_bytes]


def test_a_table_of_differences_has_the_largest_of_each_kind_by_name(serial):
    weights = serial.weights | {"norm.weight": 1.5 * serial.weights["norm.weight"]}
    gradients = (2 * serial.input_gradients[0], *serial.input_gradients[1:])
    other = dataclasses.replace(
        serial, losses=(*serial.losses[:-1], 1.25 * serial.losses[-1]), weights=weights, input_gradients=gradients
    )
    found = {name: lab06.differences(trained, serial) for name, trained in (("other", other), ("itself", serial))}
    table = pictures.differences_table(found)
    assert re.split(r"\s{2,}", table.splitlines()[0].strip()) == ["losses", "weights", "input gradients"]
    assert _rows(table) == [["other", "2.5e-01", "5.0e-01", "1.0e+00"], ["itself", *["0.0e+00"] * 3]]


def test_importing_lab_06_brings_no_torch():
    import subprocess

    told = "import sys, labkit.labs.lab06; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=False).returncode == 0
