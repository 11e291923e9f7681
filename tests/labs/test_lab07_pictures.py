"""Numbers of lab 07's pictures and claims, and the Llama that is trained through a pipeline."""

import re

import pytest
import torch.distributed as dist

from labkit.cost import hardware
from labkit.cost.links import FREE
from labkit.cost.named import named
from labkit.labs.lab07 import claims, engines, pictures, standins
from labkit.ranks.launch import launch
from labkit.schedule import theory
from labkit.schedule.classic import interleaved, one_f_one_b
from labkit.schedule.zero_bubble import zb_v


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (8, 16)])
def test_every_bubble_of_the_table_is_its_formula(p, m):
    found = pictures.bubbles(p, m)
    assert [each.played for each in found] == pytest.approx([each.theory for each in found])
    assert [each.overhead for each in found[:3]] == pytest.approx(
        [theory.overhead(p, m), theory.overhead(p, m), theory.overhead(p, m, 2)]
    )
    assert [each.kept for each in found[:2]] == [m, p] and found[4].kept == p


def test_the_table_shows_both_shares():
    row = next(line for line in pictures.bubbles_table(4, 8).splitlines() if line.startswith("1F1B"))
    assert re.split(r"  +", row) == ["1F1B", "(p-1)/(m+p-1)", "27.3%", "27.3%", "37.5%", "4"], "3/11, 3/8"


def test_a_free_link_costs_nothing_and_interleaving_pays_more_for_a_slow_one():
    shape, card = named("llama-3.1-70b"), hardware.device("H100")
    made = {1: one_f_one_b(8, 16), 2: interleaved(8, 16, 2)}
    slow = hardware.link("10 GbE")
    more = {}
    for v, schedule in made.items():
        free = pictures.with_messages(schedule, shape, 4096, card, FREE)
        assert free == pytest.approx(theory.idle_share(8, 16, v))
        more[v] = pictures.with_messages(schedule, shape, 4096, card, slow) - free
    assert 0 < more[1] < more[2]


def test_bytes_on_the_wire_by_hand():
    shape = named("llama-3.1-8b")  # hidden 4096, 32 layers
    found = pictures.wire(shape, 4, 1000)
    assert found.pipeline == 2 * 1000 * 4096 * 2
    assert found.tensor == pytest.approx(4 * 32 * 2 * (3 / 4) * 1000 * 4096 * 2)
    assert found.times == pytest.approx(2 * 32 * 2 * 3 / 4)


def test_the_heads_work_in_layers():
    shape = named("llama-3.1-8b")
    by_hand = 128256 * 4096 / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
    assert pictures.head_in_layers(shape) == pytest.approx(by_hand, rel=1e-3)
    assert pictures.stage_times([2, 1, 1], 0.5, 2) == [2.5, 1, 3]


def test_claims_rest_on_figures():
    found = claims.claims()
    assert [each.verdict for each in found] == ["half right", "half right", "wrong", "half right"]
    assert all(re.search(r"\d", each.figure) for each in found)
    assert "2.8 TB" in found[0].figure, "16 bytes for each of 175 billion parameters"
    assert f"{theory.idle_share(8, 32):.0%}" in found[1].figure


def test_a_llama_trains_alike_whole_by_a_step_by_a_schedule_and_by_torch():
    m, steps = 4, 2
    due = engines.serial(m, steps)
    assert due.losses[-1] < due.losses[0] - 0.1
    ways = [engines.train(standins.gpipe, 2, m, steps), engines.train(standins.one_f_one_b, 2, m, steps)]
    ways += [engines.scheduled(zb_v(2, m), steps), engines.by_torch("Schedule1F1B", 2, m, steps)]
    for found in ways:
        assert found.losses == pytest.approx(due.losses, abs=2e-5)
        assert sum(found.kept) == due.kept[0], "every parameter once"


def test_tied_ends_stay_one_weight_with_the_sum_and_drift_apart_without():
    due = engines.serial(2, 3, engines.TIED)
    both = engines.train(standins.one_f_one_b, 2, 2, 3, standins.sum_by_labkit)
    assert both.losses == pytest.approx(due.losses, abs=2e-5) and both.tied[0].equal(both.tied[1])
    apart = engines.train(standins.one_f_one_b, 2, 2, 3, lambda weight: None)
    assert apart.losses[0] == pytest.approx(due.losses[0], abs=2e-5)
    assert float((apart.tied[0] - apart.tied[1]).abs().max()) > 1e-3


def test_a_schedule_with_more_stages_than_layers_gets_a_layer_for_each():
    told = engines.executed(interleaved(2, 2, 3), steps=2)
    assert float(re.search(r"2 steps: losses within (\S+) of", told)[1]) < 2e-5


def test_recorded_steps_idle_as_in_theory_and_keep_what_is_in_flight():
    found = {step: engines.recorded(step, 2, 4) for step in (standins.gpipe, standins.one_f_one_b)}
    for records in found.values():
        assert pictures.on_link(records).idle_share == pytest.approx(theory.idle_share(2, 4), abs=0.002)
    first = [pictures.kept_bytes(records)[0] for records in found.values()]
    assert first[0] == 2 * first[1], "4 microbatches against 2"


def timed_by_a_clock_of_its_own(many):
    """Runs in a rank: a step takes a second a microbatch, twice that on rank 1, and far longer the first time and once
    more; a reading of the clock takes a second, too."""
    calls, clock = [], [0.0]

    def now_s():
        clock[0] += 1
        return clock[0]

    def step(stage, inputs, targets, shape, loss_fn):
        calls.append(len(inputs))
        slow = 100 if calls.count(len(inputs)) in (1, 4) else 1
        clock[0] += slow * (dist.get_rank() + 1) * len(inputs)

    return engines._timed(step, many, 8, 2, now_s)


def test_times_are_medians_of_steps_after_a_first_one():
    by_rank = launch(timed_by_a_clock_of_its_own, 2, (1, 3), prints="quiet", preload=engines.PRELOAD)
    assert by_rank == [(1, [2, 4]), (1, [3, 7])]


def test_times_are_those_of_the_slowest_rank(monkeypatch):
    def launched(fn, ranks, step, many, *more, **how):
        assert (fn, ranks, step, many) == (engines._timed, 2, standins.gpipe, (1, 2))
        return [(0.5, [1.0, 2.0]), (0.25, [3.0, 1.0])]

    monkeypatch.setattr("labkit.ranks.launch.launch", launched)
    assert engines.timed(standins.gpipe, 2, [1, 2]) == (0.5, [3.0, 2.0])
