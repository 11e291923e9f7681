"""Lab 04's exercise 4.3: the figures that its judge rests on, of a right answer, to the byte.

That the judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of them by
tests/classroom/test_prove.py.
"""

import random

import pytest

from labkit.classroom import prove
from labkit.labs.lab04 import evidence, models, parameters, parameters_held, training

SEED = 9


@pytest.fixture(scope="module")
def seen(repo):
    """(case, observed) of the notebook's answer: a deep model with a frozen layer on 3 ranks."""
    mistakes = prove.load(repo / "tests" / "mistakes" / "lab04.py")
    plan = models.Plan(5, 21, 2, depth=9, frozen=True)
    case = models.draw(random.Random(SEED), "a deep model", plan, (1, 2), 3)
    observed = parameters.observe(mistakes.RIGHT["4.3"][0], case)
    assert observed.outcome.cause is None, observed.outcome.cause
    return case, observed


def test_a_backward_costs_3_psi_and_nothing_is_sent_in_step(seen):
    case, observed = seen
    every, trained = parameters_held.all_sizes(case).padded, evidence.sizes_of(case).padded
    for record in observed.records:
        _, steps = training.cuts(record, case.micro)
        for cut, micro in zip(steps, case.micro, strict=True):
            sent = evidence.elements_sent(evidence.carriers(record, cut.begin, cut.cleared))
            assert sent == micro * (2 * every + trained) * 2 / 3
            assert evidence.carriers(record, *cut.step) == []


def test_between_steps_a_rank_holds_its_part_of_parameters_and_of_the_state(seen):
    case, observed = seen
    every, trained = parameters_held.all_sizes(case), evidence.sizes_of(case)
    counters = 4 * len(trained.elements)
    for by_step in evidence.held_between(case, observed):
        assert by_step == [4 * every.shard + 8 * trained.shard + counters - 4 * every.total] * case.steps
    assert parameters_held.between(case, observed) is None


def test_at_the_end_of_forward_a_rank_holds_what_autograd_keeps_and_no_parameter(seen):
    case, observed = seen
    kept, frozen = parameters_held.activation_bytes(case), 4 * (21 * 21 + 21)
    for record in observed.records:
        held = [training.held_at(record, end) - before for _, end, before in parameters_held._forwards(record, case)]
        # A second forward begins with the frozen layer whole, from the first one's backward.
        assert held == [kept, kept, kept - frozen]
    assert parameters_held.forward(case, observed) is None


def test_in_backward_few_parameters_are_whole_and_none_but_the_frozen_one_after_it(seen):
    case, observed = seen
    largest = 4 * max(parameters_held.all_sizes(case).elements)
    frozen = 4 * (21 * 21 + 21)
    for record in observed.records:
        _, steps = training.cuts(record, case.micro)
        part = 4 * evidence.sizes_of(case).shard
        for cut in steps:
            for _, end in cut.backwards:
                assert training.held_at(record, end) - training.held_at(record, cut.begin) == part + frozen
            for begin, end in cut.backwards:
                peak = training.peak_in(record, begin, end) - training.held_at(record, begin)
                assert peak < part + parameters_held.IN_BACKWARD * largest
    assert parameters_held.backward(case, observed) is None
    assert parameters_held.traffic(case, observed) is None


def test_backward_uses_every_weight_but_the_firsts_and_gathers_it_again(seen):
    case, observed = seen
    # gain, blend, block's inner and nine deep ones, last; torch saves no bias, and of a shift what was made of it.
    used = 1 + 2 * 21 * 3 + (1 + 9) * 21 * 21 + 2 * 21
    assert parameters_held.used_in_backward(case) == used
    assert parameters_held.again(case, observed) is None
    for record in observed.records:
        for cut in training.cuts(record, case.micro)[1]:
            for begin, end in cut.backwards:
                sent = evidence.elements_sent(evidence.carriers(record, begin, end)) * 3 / 2
                assert sent >= used + evidence.sizes_of(case).total


def test_a_freed_parameter_in_use_is_told_as_such():
    said = parameters.wrong("attempted", "raised", "setStorage: ... are out of bounds for storage of size 0", "here")
    assert parameters._freed(said).cause == "not_gathered_again"
    other = parameters.wrong("attempted", "raised", "rank 0 raised ValueError", "here")
    assert parameters._freed(other) is other and parameters._freed(None) is None
