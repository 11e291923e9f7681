"""Predictions: the first number is kept, and scored by the log of its ratio to the truth."""

import math

import pytest

from labkit.check import progress
from labkit.check.predict import Prediction, how_far, log_error, predict, reveal


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(progress.tempfile, "gettempdir", lambda: str(tmp_path))


def test_the_first_prediction_is_locked(capsys):
    assert predict("0.a", 12, "ms").value == 12
    assert predict("0.a", 9.5, "ms").value == 12
    out = capsys.readouterr().out.splitlines()
    assert out == ["0.a: you predict 12 ms. Locked.", "0.a: locked; your first prediction, 12 ms, stays."]
    assert progress.load()[0]["predictions"]["0.a"]["value"] == 12


@pytest.mark.parametrize("dots", [..., None])
def test_no_number_yet_is_a_nudge_and_no_failure(dots, capsys):
    guess = predict("0.a", dots, "ms")
    assert guess.value is None and "no prediction yet" in capsys.readouterr().out
    assert guess.reveal(3.0) is None
    assert capsys.readouterr().out == "0.a: it is 3 ms. You made no prediction.\n"
    assert progress.load()[0]["predictions"] == {}
    predict("0.a", dots, "ms")
    assert capsys.readouterr().out == "0.a: no prediction, and the outcome has been shown.\n"


def test_half_and_twice_the_truth_are_equally_wrong(capsys):
    predict("0.a", 5, "ms")
    predict("0.b", 20, "ms")
    assert reveal("0.a", 10) == pytest.approx(math.log10(2)) == reveal("0.b", 10)
    assert "you predicted 5 ms; it is 10 ms: off by a factor of 2." in capsys.readouterr().out
    assert progress.load()[0]["predictions"]["0.a"]["log_error"] == pytest.approx(math.log10(2))


def test_zero_and_negative_numbers_are_compared_only_for_equality(capsys):
    assert log_error(0, 0) == 0.0 and log_error(0, 5) is None and log_error(-1, 5) is None
    predict("0.z", 0)
    assert reveal("0.z", 4.5) is None
    assert "not comparable" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["12", True, float("nan"), float("inf"), [1], object()])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(TypeError, match="a prediction is a number") as refused:
        predict("0.a", value)
    assert refused.value._render_traceback_() == [f"TypeError: {refused.value}"]


def test_a_prediction_at_the_end_of_a_cell_shows_nothing_more():
    assert Prediction("0.a", 1.0)._ipython_display_() is None


def test_a_number_given_after_the_outcome_is_no_prediction(capsys):
    reveal("0.a", 10, "ms")
    capsys.readouterr()
    guess = predict("0.a", 10, "ms")
    told = capsys.readouterr().out
    assert told == "0.a: 10 ms comes after the outcome was shown: not a prediction, not scored.\n"
    assert guess.reveal(10) is None and "You made no prediction" in capsys.readouterr().out
    assert progress.load()[0]["predictions"] == {}


def test_a_prediction_stays_one_after_its_outcome_was_shown(capsys):
    predict("0.a", 5, "ms")
    reveal("0.a", 10)
    assert predict("0.a", 10, "ms").value == 5
    assert "your first prediction, 5 ms, stays" in capsys.readouterr().out


@pytest.mark.parametrize(("guess", "told"), [(10, "it is 10: exact."), (14, "no: it is 10.")])
def test_a_whole_number_without_a_unit_is_right_or_it_is_not(guess, told, capsys):
    predict("0.counter", guess)
    reveal("0.counter", 10)
    assert capsys.readouterr().out.splitlines()[-1] == f"0.counter: you predicted {guess}{'; ' + told}"


@pytest.mark.parametrize(
    ("predicted", "actual", "told"),
    [
        (0.46, 0.506401, "9.2 % too low"),
        (1.4, 1.0, "40 % too high"),
        (1.00001, 1.0, "less than 0.1 % too high"),
        (1.6, 1.0, "off by a factor of 1.6"),
        (0.001, 0.506401, "off by a factor of 510"),
        (-1.0, 1.0, "not comparable"),
    ],
)
def test_small_errors_are_told_in_percent_and_large_ones_as_a_factor(predicted, actual, told):
    assert how_far(predicted, actual) == told


@pytest.mark.parametrize(
    ("guess", "actual", "told"),
    [
        (100, 71.7, "it is 71.7 %: 28 points too high."),
        (0, 71.7, "it is 71.7 %: 72 points too low."),
        (25.1, 24.1, "it is 24.1 %: 1 point too high."),
        (3.99, 4.0, "it is 4 %: less than 0.1 points too low."),
    ],
)
def test_percentages_are_compared_in_points(guess, actual, told, capsys):
    predict("0.share", guess, "%")
    reveal("0.share", actual, "%")
    assert capsys.readouterr().out.splitlines()[-1] == f"0.share: you predicted {guess} %; {told}"


@pytest.mark.parametrize(
    ("guess", "unit", "told"),
    [(1, "times", "1 times"), (1.0, "rounds", "1 round"), (2, "times", "2 times"), (1, "ms", "1 ms"), (1, "s", "1 s")],
)
def test_one_of_a_unit_is_in_the_singular_but_a_factor_is_not(guess, unit, told, capsys):
    predict("0.one", guess, unit)
    predict("0.one", ..., unit)
    reveal("0.one", guess, unit)
    assert capsys.readouterr().out.splitlines() == [
        f"0.one: you predict {told}. Locked.",
        f"0.one: your prediction is {told}.",
        f"0.one: you predicted {told}; it is {told}: exact.",
    ]


@pytest.mark.parametrize(
    ("actual", "told"),
    [(0.506401, "0.506 s"), (12.3456, "12.3 s"), (15238.25, "15238 s"), (999, "999 s"), (1.23456e9, "1.23e+09 s")],
)
def test_what_was_measured_has_no_more_digits_than_mean_something(actual, told, capsys):
    reveal("0.send", actual, "s")
    assert capsys.readouterr().out == f"0.send: it is {told}. You made no prediction.\n"
