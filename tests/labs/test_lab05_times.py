"""The line of stations against its replay, by hand and by formula; curves, configurations and decisions of lab 05."""

import random

import pytest

from labkit.cost import hardware
from labkit.cost.named import named
from labkit.cost.shapes import parameters
from labkit.labs import lab05
from labkit.labs.lab05 import configurations, pays, stations, step_time, sweep
from labkit.labs.lab05.claims import lora_parameters

WIRES = {"hbm": 2e12, "pcie": 20e9, "dram": 100e9, "nvme": 6e9}


def formula(n, layers, forward_s, backward_s, wires, state, overlap):
    """One layer through all stations, and the others at the slowest one's pace."""
    if state == "device":
        return forward_s + backward_s + 28 * n / wires["hbm"]
    link = 2 * n / wires["pcie"]
    line = [backward_s, link, 28 * n / wires["dram"], link] + [12 * n / wires["nvme"]] * 2 * (state == "disk")
    pieces = layers if overlap else 1
    return forward_s + sum(line) / pieces + (pieces - 1) / pieces * max(line)


def test_the_example_of_the_exercise():
    assert stations.play(*step_time.EXAMPLE).time_s == pytest.approx(0.4)


@pytest.mark.parametrize("seed", range(3))
def test_replay_clocks_and_formula_agree(seed):
    for question in step_time.ask(random.Random(seed)):
        due = formula(*question)
        assert stations.play(*question).time_s == pytest.approx(due, rel=1e-9)
        assert stations.step_time_s(*question) == pytest.approx(due, rel=1e-9)


def test_a_replay_ends_whole():
    played = stations.play(1e9, 5, 0.1, 0.2, WIRES, "disk", True)
    assert played.deadlock == "" and played.findings == ()
    moves = [span for span in played.spans if span.kind == "communication" and span.label == "send"]
    assert len(moves) == 5 * len(stations.stations("disk"))


@pytest.mark.parametrize(
    ("state", "layers", "n"), [("gpu", 2, 1e9), ("host", 0, 1e9), ("host", 2.0, 1e9), ("disk", 2, 0)]
)
def test_what_cannot_be_is_refused_in_a_line(state, layers, n):
    with pytest.raises(ValueError, match="state is|must be"):
        stations.step_time_s(n, layers, 0.1, 0.2, WIRES, state, True)


def test_every_mistake_of_5_3_gives_other_times():
    questions = step_time.ask(random.Random(0))
    for cause in step_time._SENTENCES:
        assert any(not step_time._same(step_time._mistake(cause, *q), formula(*q)) for q in questions), cause
    assert all(step_time._same(step_time._mistake("", *q), formula(*q)) for q in questions)


def test_the_curves_are_flops_at_half_the_peak_and_the_formula():
    setup, tokens = sweep.Setup("llama-2-7b", "A100-80", "8 x DDR4-3200", "Samsung 990 PRO"), (1024, 65536)
    card, count = hardware.device("A100-80"), parameters(named("llama-2-7b"))
    for number, time_s in zip(tokens, sweep.over_tokens(setup, "host", True, tokens), strict=True):
        forward_s, backward_s = sweep.compute_s(setup, number)
        assert backward_s == pytest.approx(2 * forward_s)
        dense = 6 * (count - 32000 * 4096) * number / (0.5 * card.peak("bf16"))
        assert dense <= forward_s + backward_s <= 1.1 * dense  # and attention
        wires = {"pcie": card.host.bandwidth, "dram": 8 * 3200e6 * 8, "nvme": 6.9e9, "hbm": card.memory_bandwidth}
        assert time_s == pytest.approx(formula(count, 32, forward_s, backward_s, wires, "host", True))
    assert sweep.device_bytes(setup, "device") == 16 * count and sweep.device_bytes(setup, "host") == 2 * count


def test_the_six_are_decided_as_the_lab_tells():
    assert [pays.decide(c) for c in lab05.six()] == ["device", "host", "host", "disk", "recompute", "nowhere"]


def test_bytes_of_a_way_by_hand():
    c = configurations.six()[2]
    found, n = pays.ways(c), c.num_parameters
    assert found["device"][0] == 16 * n + c.activation_bytes
    assert found["recompute"][0] == 16 * n + c.recomputed_bytes < found["device"][0]
    assert found["host"][:2] == (2 * n + c.activation_bytes, 14 * n)
    assert found["disk"][1] == pytest.approx(2 * n) and found["disk"][2] == pytest.approx(12 * n)


@pytest.mark.parametrize("seed", range(8))
def test_random_configurations_are_clear_of_every_kind_and_show_every_mistake(seed):
    found = pays.chosen(random.Random(seed))
    due = [pays.decide(c) for c in found]
    assert all(due.count(way) >= pays.LEAST for way in (*pays.WAYS, pays.NOWHERE))
    assert all(map(pays.clear, found))
    for mistake in pays._SENTENCES:
        assert [pays.decide(c, mistake) for c in found] != due, mistake


def test_lora_on_q_and_v_of_the_3b_trains_4_59_million():
    assert lora_parameters() == 28 * 16 * (3072 + 3072 + 3072 + 1024) == 4_587_520


def test_each_claim_has_a_verdict_with_a_number():
    found = lab05.claims()
    assert [each.verdict for each in found] == ["right", "wrong", "right", "wrong"]
    assert all(any(letter.isdigit() for letter in each.figure) for each in found)
