"""Predictions: commit to a number before the experiment, and see afterwards how far off it was.

The first number counts and is kept in the progress file, if it came before the outcome was shown. How far off:
|log10(predicted / actual)|, so that half and twice the truth are equally wrong; told as a factor, or in percent
where it is less than half as much again; between two percentages it is told in points. A whole number without a unit
(a counter, a rank) is right or it is not.
Left out: points; a wrong prediction costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from labkit.check import progress

_FACTOR = 1.5  # below this an error is told in percent


class NotANumber(TypeError):
    """A prediction that is none; in a notebook it is one line without a traceback through labkit."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback; it must not raise.
        return [f"TypeError: {' '.join(map(str, self.args))}"]


@dataclass(frozen=True)
class Prediction:
    """A number the learner committed to; value None when there is none as yet."""

    name: str
    value: float | None
    unit: str = ""

    def reveal(self, actual: float) -> float | None:
        """As `reveal(name, actual)`."""
        return reveal(self.name, actual, self.unit)

    def _ipython_display_(self) -> None:
        """Shows nothing: `predict` has said it all."""


def predict(name: str, value: Any = ..., unit: str = "") -> Prediction:
    """Commit to `value` (a number) for the question `name`, e.g. predict("0.a", 12, "ms"). The first one is kept.

    With ... or None there is no prediction yet: says so and goes on. After the outcome was shown a number is no
    prediction: says so, and stores nothing. Raises TypeError for anything else that is not a finite number.
    """
    data, _ = progress.load()
    kept = data["predictions"].get(name)
    shown = kept is None and name in data.get("revealed", {})
    if value is None or value is ...:
        if kept is None:
            hint = "Put a number in place of the dots and run this cell again."
            print(f"{name}: no prediction{', and the outcome has been shown.' if shown else f' yet. {hint}'}")
            return Prediction(name, None, unit)
        print(f"{name}: your prediction is {_typed(kept['value'], kept['unit'])}.")
        return Prediction(name, kept["value"], kept["unit"])
    number = _number(name, value)
    if shown:
        print(f"{name}: {_typed(number, unit)} comes after the outcome was shown: not a prediction, not scored.")
        return Prediction(name, None, unit)
    return _locked(name, number, unit)


def _locked(name: str, number: float, unit: str) -> Prediction:
    def change(data: dict) -> None:
        new = {"value": number, "unit": unit, "predicted": progress.now(), "actual": None, "log_error": None}
        data["predictions"].setdefault(name, new)

    saved = progress.update(change)
    kept = saved.data["predictions"][name]
    if kept["value"] == number:
        print(f"{name}: you predict {_typed(number, kept['unit'])}. Locked.")
    else:
        print(f"{name}: locked; your first prediction, {_typed(kept['value'], kept['unit'])}, stays.")
    _warn(saved)
    return Prediction(name, kept["value"], kept["unit"])


def reveal(name: str, actual: float, unit: str = "") -> float | None:
    """Put the outcome beside the prediction: prints both and returns |log10(predicted / actual)|.

    None when there is no prediction, or when one of the two is not positive and they differ.
    """
    number = _number(name, actual)
    data, _ = progress.load()
    kept = data["predictions"].get(name)
    if kept is None:
        print(f"{name}: it is {_measured(number, unit)}. You made no prediction.")
        if name not in data.get("revealed", {}):
            _warn(progress.update(lambda data: data.setdefault("revealed", {}).setdefault(name, progress.now())))
        return None
    error = log_error(kept["value"], number)

    def change(data: dict) -> None:
        data["predictions"].setdefault(name, kept).update(actual=number, log_error=error)

    saved = progress.update(change)
    unit = unit or kept["unit"]
    begin = f"{name}: you predicted {_typed(kept['value'], unit)}"
    if error == 0:
        print(f"{begin}; it is {_measured(number, unit)}: exact.")
    elif not unit and number.is_integer():
        print(f"{begin}; no: it is {_measured(number, unit)}.")
    else:
        print(f"{begin}; it is {_measured(number, unit)}: {how_far(kept['value'], number, unit)}.")
    _warn(saved)
    return error


def log_error(predicted: float, actual: float) -> float | None:
    """|log10(predicted / actual)|; 0.0 when equal; None when it is not defined."""
    if predicted == actual:
        return 0.0
    if predicted <= 0 or actual <= 0:
        return None
    return abs(math.log10(predicted) - math.log10(actual))


def how_far(predicted: float, actual: float, unit: str = "") -> str:
    """The distance of two numbers that differ, in words: "9 % too low", "off by a factor of 510", "28 points too high".

    Points where the unit is "%": a percentage of a percentage reads as another one.
    """
    way = "low" if predicted < actual else "high"
    if unit == "%":
        points = f"{abs(predicted - actual):.2g}"
        if abs(predicted - actual) < 0.1:
            return f"less than 0.1 points too {way}"
        return f"{points} point{'' if points == '1' else 's'} too {way}"
    error = log_error(predicted, actual)
    if error is None:
        return "not comparable"
    if 10**error >= _FACTOR:
        return f"off by a factor of {_short(10**error)}"
    percent = 100 * abs(predicted / actual - 1)
    return f"{percent:.2g} % too {way}" if percent >= 0.1 else f"less than 0.1 % too {way}"


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, (bool, str)) or not math.isfinite(number):
        raise NotANumber(f"{name}: a prediction is a number, such as 12 or 3.5e6, not {value!r}")
    return number


def _typed(value: float, unit: str) -> str:
    """A number as a learner gave it."""
    return _with_unit(f"{value:.10g}", unit)


def _measured(value: float, unit: str) -> str:
    """Whole numbers whole, up to a billion; others to three digits, or to the unit where that is more."""
    whole = value.is_integer() and abs(value) < 1e9
    text = f"{value:.0f}" if whole or 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    return _with_unit(text, unit)


def _with_unit(number: str, unit: str) -> str:
    """A unit that is a word in the plural ("rounds", not "ms") is in the singular after a 1; "1 times" is a factor."""
    one = number == "1" and len(unit) > 3 and unit.endswith("s") and unit != "times"
    return f"{number} {unit[:-1] if one else unit}".rstrip()


def _short(factor: float) -> str:
    """Two digits, without an exponent where there is room: 1.6, 12, 450, then 5e+04."""
    return f"{factor:.2g}" if factor < 100 or factor >= 10_000 else f"{round(factor, -1):.0f}"


def _warn(saved: progress.Saved) -> None:
    if saved.warning:
        print(f"labkit: {saved.warning}")
