"""Comparison of values: what counts as the same, and in which words a difference is told."""

import numpy as np
import pytest
import torch

from labkit.check import compare
from labkit.check.compare import difference


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor(7),
        np.array([True, False]),
        range(3, 7),
        [1, (2.0, "three"), {"four": None}],
        NotImplemented,
    ],
)
def test_a_value_equals_itself(value):
    assert difference(value, value) is None


def test_shape_type_and_dtype_are_looked_at_before_values():
    expected = torch.zeros(2, 3)
    for got in (
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.float64),
        [[0.0] * 3] * 2,
        None,
        torch.zeros(2, 3).numpy(),
    ):
        assert difference(got, expected).stage == "shape", got
    assert difference(1, True).stage == "shape"
    assert difference([1, 2], [1, 2, 3]).stage == "shape"
    assert difference({"a": 1}, {"b": 1}).stage == "shape"


def test_a_difference_names_its_place_and_both_values():
    got, expected = torch.zeros(4, 5), torch.zeros(4, 5)
    got[2, 3] = 7
    found = difference(["x", {"loss": got}], ["x", {"loss": expected}])
    assert (found.stage, found.where) == ("values", "[1]['loss'][2, 3]")
    assert found.got == "7.0 (1 of 20 elements differ)" and found.expected == "0.0"
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])).got == "[1, 2]"


def test_tolerance_is_relative_to_the_expected_value_and_off_by_default():
    expected = torch.tensor([100.0, 1.0])
    got = expected * 1.0001
    assert difference(got, expected).stage == "values"
    assert difference(got, expected, rtol=1e-3) is None
    assert difference(got, expected, rtol=1e-5).stage == "values"
    assert difference(3, 3.0) is None and difference(3.0, 3).stage == "shape"
    assert difference(float("inf"), 1.0, rtol=1e-3, atol=1.0).stage == "values"
    assert difference(torch.tensor([float("nan")]), torch.tensor([1.0]), rtol=1.0).stage == "values"


def test_unsigned_and_large_integers_are_compared_exactly():
    assert difference(torch.tensor([0], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8), atol=0) is not None
    big = torch.tensor([2**62])
    assert difference(big + 1, big).stage == "values"
    assert difference(2**62 + 1, 2**62).stage == "values"


def test_a_tensor_that_answers_for_itself_is_not_believed():
    class Agreeable(torch.Tensor):
        def __eq__(self, other):
            return True

        def numpy(self):
            return np.zeros(3)

    got = torch.ones(3).as_subclass(Agreeable)
    found = difference(got, torch.zeros(3))
    assert found.stage == "shape" and "Agreeable" in found.got


def test_a_replaced_allclose_does_not_change_the_verdict(monkeypatch):
    monkeypatch.setattr(torch, "allclose", lambda *a, **k: True)
    monkeypatch.setattr(torch, "equal", lambda *a, **k: True)
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda *a: True)
    assert difference(torch.zeros(2), torch.ones(2)) is not None


def test_a_tensor_with_a_gradient_is_compared_by_its_values():
    got = torch.ones(3, requires_grad=True) * 2
    assert difference(got, torch.full((3,), 2.0)) is None


def test_the_first_rank_that_disagrees_is_named():
    rank, found = compare.same_on_all([torch.ones(2), torch.ones(2), torch.zeros(2)])
    assert rank == 2 and found.stage == "values"
    assert compare.same_on_all([1, 1]) is None
