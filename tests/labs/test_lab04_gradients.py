"""Lab 04's exercise 4.2: the figures that its judge rests on, of a right answer, to the byte.

That the judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on all of them by
tests/classroom/test_prove.py.
"""

import random

import pytest

from labkit.classroom import prove
from labkit.labs.lab04 import evidence, gradients, models, training

SEED = 7


@pytest.fixture(scope="module")
def seen(repo):
    """(case, observed) of the notebook's answer: a deep model on 3 ranks, two backwards in the second step."""
    mistakes = prove.load(repo / "tests" / "mistakes" / "lab04.py")
    case = models.draw(random.Random(SEED), "a deep model", models.Plan(5, 21, 2, depth=9), (1, 2), 3)
    observed = gradients.observe(mistakes.RIGHT["4.2"][0], case)
    assert observed.outcome.cause is None, observed.outcome.cause
    return case, observed


def test_a_step_of_k_backwards_sends_k_plus_1_psi(seen):
    case, observed = seen
    padded = evidence.sizes_of(case).padded
    for record in observed.records:
        _, steps = training.cuts(record, case.micro)
        for cut, micro in zip(steps, case.micro, strict=True):
            sent = evidence.elements_sent(evidence.carriers(record, cut.begin, cut.cleared))
            assert sent == (micro + 1) * padded * 2 / 3


def test_after_each_backward_a_rank_holds_its_part_of_the_gradients(seen):
    case, observed = seen
    part = 4 * evidence.sizes_of(case).shard  # gloo's threads may still hold one parameter's
    for record, result in zip(observed.records, observed.results, strict=True):
        _, steps = training.cuts(record, case.micro)
        for cut, after in zip(steps, result["after"], strict=True):
            held = [training.held_at(record, end) - training.held_at(record, cut.begin) for _, end in cut.backwards]
            assert all(part <= each <= part + part // 8 for each in held) and after == [0] * len(after)


def test_in_backward_it_never_holds_half_of_them(seen):
    case, observed = seen
    for record in observed.records:
        _, steps = training.cuts(record, case.micro)
        for cut in steps:
            for begin, end in cut.backwards:
                peak = training.peak_in(record, begin, end) - training.held_at(record, begin)
                assert 0 < peak < 4 * evidence.sizes_of(case).total / 2
    assert gradients.gradients_are_sharded(case, observed) is None
    assert gradients.while_backward(case, observed) is None
    assert gradients._state(case, observed) is None


def test_a_pass_says_the_figures_that_were_measured(seen):
    case, observed = seen
    text = gradients.figures(case, observed)
    sizes = evidence.sizes_of(case)
    assert f"of {sizes.total} gradients" in text and f"{4 * sizes.shard} bytes after backward" in text
    assert f"{3 * sizes.padded * 2 / 3 / sizes.total:.2f}Ψ" in text
