"""Lab 02's exercise 2.4: what its judge asks, and how it knows a mistake, in plain lists and without ranks.

That the judge refuses the wrong answers and cheats it should, and accepts the right ones, is tried on real ranks by
tests/classroom/test_prove.py.
"""

import array
import builtins
import random
from collections import namedtuple
from dataclasses import replace
from fractions import Fraction
from types import FunctionType

import pytest

from labkit.check import evidence
from labkit.classroom import prove
from labkit.labs.lab02 import sampler, sampler_plain, sampler_told
from labkit.labs.lab02.sampler_told import Group
from labkit.record.integrity import Finding, Integrity

# Seen in a rank only: by its generators, its signature, or because the group is asked.
IN_RANKS = (
    "not_repeatable",
    "global_generator",
    "generator",
    "raised",
    "wrong_signature",
    "ignores_arguments",
    "text_hashed",
)


@pytest.fixture(scope="module")
def answers(repo):
    prove.load(repo / "tests" / "mistakes" / "lab02_sampler.py")
    return __import__("lab02_sampler")


def verdict(fn, seed):
    """As the judge would find from values alone; None for a right answer."""
    rng = random.Random(seed)
    for questions in (sampler._about_themselves(rng), sampler._about_others(rng)):
        asked = [each for mine in questions for each in mine]
        found = [sampler_plain.answer(fn(*question.args)) for question in asked]
        wrong = sampler._wrong_type(asked, found) or sampler._not_repeatable(asked, found)
        wrong = wrong or sampler._wrong_steps(asked, found)
        if wrong is not None:
            return wrong
    return None


@pytest.mark.parametrize("seed", range(12))
def test_right_answers_are_right_and_wrong_ones_told_their_cause_whatever_the_seed(seed, answers):
    for fn in answers.RIGHT:
        assert verdict(fn, seed) is None, (fn.__name__, verdict(fn, seed))
    for fn, causes in answers.WRONG:
        causes = (causes,) if isinstance(causes, str) else causes
        if not set(causes) & set(IN_RANKS):
            found = verdict(fn, seed)
            assert found is not None and found.cause in causes, (fn.__name__, found)


@pytest.mark.parametrize("seed", range(20))
def test_questions_have_a_rank_without_a_last_batch_an_exact_multiple_and_no_samples(seed):
    rng = random.Random(seed)
    groups = {question.group for mine in sampler._about_themselves(rng) for question in mine}
    tails = {group.num_samples % group.full for group in groups}
    assert 0 in tails and any(0 < tail < 4 for tail in tails)
    assert any(group.num_samples == 0 for group in groups)
    assert any(0 < group.num_samples < group.world_size for group in groups)
    assert any(group.batch_size == 1 for group in groups)
    others = {question.group for mine in sampler._about_others(rng) for question in mine}
    assert {1, 2, 9} <= {group.world_size for group in others}


def test_no_rank_is_asked_about_itself_when_it_is_asked_about_others():
    for rank, questions in enumerate(sampler._about_others(random.Random(3))):
        assert all((question.rank + 1) % 3 == rank for question in questions)


def test_every_epoch_and_seed_that_is_compared_has_a_partner_that_differs_in_it_alone():
    groups = {q.group for mine in sampler._about_themselves(random.Random(0)) for q in mine}
    groups = {group for group in groups if sampler_told.orders_can_differ(group)}
    for what in ("epoch", "seed"):
        pairs = [(a, b) for a in groups for b in groups if a != b and replace(a, **{what: getattr(b, what)}) == b]
        assert pairs


def test_a_last_step_may_be_split_in_any_way():
    group = Group(10, 4, 2, 0, 0)
    for first in (0, 1, 2):
        ranks = [
            [([0, 1, 2, 3], 0.5), ([8, 9][:first], first / 2)],
            [([4, 5, 6, 7], 0.5), ([8, 9][first:], (2 - first) / 2)],
        ]
        assert sampler_told.samples(group, ranks) is None and sampler_told.steps(group, ranks) is None
        assert sampler_told.weights({group: ranks}) is None


def test_a_step_that_is_not_full_is_told_with_its_totals():
    group = Group(10, 4, 2, 0, 0)
    ranks = [[([0, 1, 2], 0.5), ([8, 9], 0.5)], [([4, 5, 6], 0.5), ([3, 7], 0.5)]]
    cause, _, got, expected = sampler_told.steps(group, ranks)
    assert cause == "not_full" and "6, 4" in got and "8, 2" in expected


def test_within_a_step_the_order_of_samples_does_not_count():
    one = [[([3, 1], 0.5)], [([2, 0], 0.5)]]
    other = [[([0, 1], 0.5)], [([2, 3], 0.5)]]
    assert sampler_told.order(one) == sampler_told.order(other) == sampler_told.unshuffled(Group(4, 2, 2, 0, 0))


def test_known_weights_differ_from_the_right_ones_and_from_each_other():
    group = Group(21, 4, 3, 0, 0)
    counts = [(4, 12), (4, 12), (4, 12), (4, 9), (3, 9), (2, 9), (0, 9)]
    made = {
        name: tuple(round(mistake(group, c, t), 9) for c, t in counts)
        for name, (mistake, _) in sampler_told._weights().items()
    }
    right = tuple(round(c / t, 9) for c, t in counts)
    assert len(set(made.values())) == len(made) and right not in made.values()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (None, "returns_nothing"),
        (iter([]), "not_a_list"),
        ([1, 2], "no_steps"),
        ([[1, 2, 3]], "no_weight"),
        ([([1.5], 1.0)], "wrong_step"),
        ([([1], "a")], "wrong_step"),
        ([([1], True)], "wrong_step"),
        ([(1, 2)], "no_weight"),
        ([{"indices": [1], "weight": 1.0}], "wrong_step"),
        ([(0, [1], 1.0)], "wrong_step"),
        (([[1], [2, 3]], [0.5, 0.5]), "wrong_step"),
        ([([1], float("nan"))], "not_finite"),
        ([([1], 10**400)], "not_finite"),
        ([([10**5000], 1.0)], "past_the_end"),
        ([([], 0.0)] * 20_000, "too_many"),
        ([(range(10**30), 1.0)], "too_many"),
    ],
)
def test_what_is_no_list_of_steps_is_told_so(answer, cause):
    question = sampler.Question(Group(4, 1, 2, 0, 0), 0)
    assert sampler._wrong_type([question], [sampler_plain.answer(answer)]).cause == cause


def test_numpys_numbers_and_tuples_are_as_good_as_lists_of_ints():
    np = pytest.importorskip("numpy")
    answer = ((np.array([3, 1]), np.float32(0.5)), (tuple(np.array([2])), 1))
    assert sampler_plain.answer(answer) == [([3, 1], 0.5), ([2], 1.0)]


def test_a_tensor_handed_to_numpy_is_forgiven_and_nothing_else():
    numpys, files = Finding("numpy_used", "a.", "x:1"), Finding("file_used", "b.", "x:2")
    integrity = Integrity((numpys, files), True, 1, 1, ())
    told = (["numpy_used", "a.", "x:1"], ["file_used", "b.", "x:2"], 2)
    seen = evidence.Observed(1, (None,), (None,), (integrity,), None, (told,))
    left = sampler._numpy_allowed(seen)
    assert left.integrity[0].findings == (files,)
    assert left.witnesses == ((["file_used", "b.", "x:2"], 1),)


def test_a_namedtuple_a_fraction_and_an_array_are_a_step():
    step = namedtuple("Step", "indices weight")(array.array("q", [3, 1]), Fraction(1, 2))
    assert sampler_plain.answer([step]) == [([3, 1], 0.5)]


def test_tensors_are_told_apart_also_as_numbers_in_a_list():
    torch = pytest.importorskip("torch")
    for answer in ([(torch.tensor([1]), 0.5)], [([torch.tensor(1)], 0.5)], [([1], torch.tensor(0.5))]):
        question = sampler.Question(Group(4, 1, 2, 0, 0), 0)
        assert sampler._wrong_type([question], [sampler_plain.answer(answer)]).cause in ("tensor_indices", "wrong_step")


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_share_a_step_by_chance_in_a_shuffle_and_nearly_always_without_one(seed):
    rng = random.Random(seed)
    groups = {question.group for mine in sampler._about_themselves(rng) for question in mine}
    groups = [group for group in groups if sampler_told.orders_can_differ(group)]
    cut = {group: list(range(group.num_samples)) for group in groups}

    def steps():
        return {g: [order[i : i + g.full] for i in range(0, len(order), g.full)] for g, order in cut.items()}

    for order in cut.values():
        order.append(order.pop(0))
    assert sampler_told.hardly_shuffled(steps()) is not None
    for order in cut.values():
        rng.shuffle(order)
    assert sampler_told.hardly_shuffled(steps()) is None


def test_the_hash_of_a_text_differs_between_ranks_and_that_of_numbers_does_not():
    def hashes():
        return hash("a"), hash((1, ("a", 2))), hash((1, 2)), hash(7)

    found = []
    for rank in range(2):
        fn = FunctionType(hashes.__code__, {"__builtins__": builtins})
        count = sampler._salt_hash(fn, rank)
        assert fn() == fn() and len(count) == 4
        found.append(fn())
    assert [one == other for one, other in zip(*found, strict=True)] == [False, False, True, True]
