"""Judge of exercise 5.3, `offload_step_time`: seconds of a step with Adam on the device, the host or a disk.

What is due comes from a replay of the step (`stations`), not from a formula. The function is arithmetic, so it is
asked many questions at once, and a wrong answer is recognised by what known mistakes would return. Left out: units and
overflow; figures are those of real models and machines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import labkit.labs.lab05.asked as asked
import labkit.labs.lab05.stations as stations
from labkit.check import evidence
from labkit.check.exercise import Verdict, right, wrong
from labkit.check.honesty import honest
from labkit.labs.lab00 import attempts

NAME = "offload_step_time"
RTOL = 1e-6
# num_parameters, layers, forward_s, backward_s, bandwidth, state, overlap
Question = tuple[float, int, float, float, dict[str, float], str, bool]
EXAMPLE_WIRES = {"hbm": 2e12, "pcie": 20e9, "dram": 100e9, "nvme": 6e9}
# The example of the exercise's text comes first.
EXAMPLE: Question = (1_000_000_000, 20, 0.1, 0.2, EXAMPLE_WIRES, "host", True)


def judge(fn: Callable, seed: int) -> Verdict:
    """Three places, overlapped and not, each station the slowest in turn; asked on two ranks."""
    questions = ask(random.Random(seed))
    seen = evidence.observe(_answers, 2, args=(fn, questions))
    tried = "on 2 ranks"
    failed = attempts.ran(seen, NAME, tried)
    if failed is not None:
        return failed
    due = [stations.play(*question).time_s for question in questions]
    for answers in seen.results:
        found = _wrong_type(questions, answers) or _wrong_value(questions, answers, due)
        if found is not None:
            return found
    found = evidence.no_communication(seen, tried) or honest(seen, tried)
    worst = max(abs(a / d - 1) for a, d in zip(seen.results[0], due, strict=True))
    return found or right(f"within {max(worst, 1e-16):.0e} of the replay, for {len(questions)} steps in three places")


def ask(rng: random.Random) -> list[Question]:
    """Questions: the example, then every place and overlap, with a slow wire or a slow backward by turns."""
    questions = [EXAMPLE]
    for state in stations.STATES:
        for overlap in (True, False):
            for slow in ("pcie", "dram", "nvme", "backward"):
                questions.append(_question(rng, state, overlap, slow))
    questions.append((*_question(rng, "host", True, "pcie")[:1], 1, 0.1, 0.2, dict(EXAMPLE_WIRES), "host", True))
    questions[1:] = rng.sample(questions[1:], len(questions) - 1)
    return questions


def _question(rng: random.Random, state: str, overlap: bool, slow: str) -> Question:
    wires = {
        "hbm": rng.uniform(0.8e12, 4e12),
        "pcie": rng.uniform(12e9, 60e9),
        "dram": rng.uniform(150e9, 400e9),
        "nvme": rng.uniform(80e9, 160e9),  # a row of drives, so that not every step waits for them
    }
    parameters = round(rng.uniform(1e8, 2e10))
    backward_s = parameters * rng.uniform(0.5e-10, 2e-10)
    if slow == "backward":
        backward_s *= 20
    else:
        wires[slow] /= {"pcie": 10, "dram": 10, "nvme": 30}[slow]
    return parameters, rng.randint(2, 48), backward_s * rng.uniform(0.4, 0.6), backward_s, wires, state, overlap


def _answers(fn: Callable, questions: list[Question]) -> Any:
    """Runs in a rank. A stub is told apart from wrong answers. labkit's own two ways to work it out are shut off."""
    found = asked.borrowed(fn)
    if found is not None:
        return found
    kept = stations.play, stations.step_time_s

    def shut(*args, **kwargs):
        raise RuntimeError("labkit.labs.lab05 does the work here: write it yourself")

    stations.play = stations.step_time_s = shut
    try:
        answers = [fn(*question[:4], dict(question[4]), *question[5:]) for question in questions]
    finally:
        stations.play, stations.step_time_s = kept
    return NotImplemented if any(answer is NotImplemented for answer in answers) else answers


def _call(question: Question) -> str:
    parameters, layers, forward_s, backward_s, wires, state, overlap = question
    told = ", ".join(f"{name} {rate / 1e9:.4g} GB/s" for name, rate in wires.items())
    times = f"{forward_s:.4g}, {backward_s:.4g}"
    return f"{NAME}({parameters}, {layers}, {times}, {{{told}}}, {state!r}, {overlap})"


def _wrong_type(questions: list[Question], answers: list) -> Verdict | None:
    for question, answer in zip(questions, answers, strict=True):
        if type(answer) not in (int, float) or not math.isfinite(answer):
            sentence = "the answer is one number: seconds of a step."
            if answer is None:
                sentence = f"nothing came back for state={question[5]!r}, overlap={question[6]}: return seconds."
            return wrong("shape", "not_a_number", sentence, _call(question), answer, "a number")
    return None


def _wrong_value(questions: list[Question], answers: list, due: list[float]) -> Verdict | None:
    for question, answer, expected in zip(questions, answers, due, strict=True):
        if not _same(answer, expected):
            cause, sentence = _known(questions, answers) or _where(questions, answers, due)
            return wrong("values", cause, sentence, _call(question), f"{answer:.6g} s", f"{expected:.6g} s")
    return None


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=RTOL)


def _known(questions: list[Question], answers: list) -> tuple[str, str] | None:
    if len(set(answers)) == 1:
        return "hard_coded", "the same number comes back whatever is asked: the example's answer by heart."
    for cause, sentence in _SENTENCES.items():
        if all(_same(a, _mistake(cause, *question)) for question, a in zip(questions, answers, strict=True)):
            return cause, sentence
    return None


def _where(questions: list[Question], answers: list, due: list[float]) -> tuple[str, str]:
    """Which kinds of step are wrong, when no single mistake explains everything."""
    bad = [q for q, a, d in zip(questions, answers, due, strict=True) if not _same(a, d)]
    kinds = list(dict.fromkeys(f"state={q[5]!r}, overlap={q[6]}" for q in bad))
    good = list(dict.fromkeys(f"state={q[5]!r}, overlap={q[6]}" for q in questions if q not in bad))
    good = [each for each in good if each not in kinds]
    sentence = f"wrong for {'; '.join(kinds)}"
    sentence += f", and right for {'; '.join(good)}." if good else ": what does each station take?"
    return "wrong_time", sentence


def _mistake(name: str, n: float, layers: int, forward_s: float, backward_s: float, wires: dict, state: str, overlap):
    """What a known mistake returns."""
    down, up = (4, 4) if name == "wide" else (2, 0 if name == "no_way_back" else 2)
    touched = {"adam_free": 0, "state_once": 16, "state_only": 24}.get(name, 28)
    touched = 26 if name == "gradients_in_dram" else touched
    if state == "device":
        adam_s = 0 if name in ("adam_free", "device_adam_free") else touched * n / wires["hbm"]
        return _unit(name, forward_s + backward_s + adam_s)
    if name == "state_over_pcie":
        down, up = down + 12, up + 12
    touched = 24 if name == "state_only_on_host" else touched
    adam_s = touched * n / wires["hbm" if name == "adam_on_device" else "dram"]
    parts = [backward_s, down * n / wires["pcie"], adam_s, up * n / wires["pcie"]]
    if name == "one_way_wire":
        parts[1:] = [parts[1] + parts[3], adam_s]
    if state == "disk" and name != "disk_forgotten":
        moved = (8 if name == "master_not_on_disk" else 12) * n / wires["nvme"]
        parts += [2 * moved] if name == "one_way_disk" else [moved] if name == "reads_only" else [moved, moved]
    if state == "disk" and name == "disk_on_device":
        parts = [parts[0], adam_s, *parts[4:]]
    together = overlap and name != "never_overlaps" or name == "always_overlaps"
    if not together:
        return _unit(name, forward_s + sum(parts))
    return _unit(name, _overlapped(name, forward_s, parts, layers))


def _overlapped(name: str, forward_s: float, parts: list[float], layers: int) -> float:
    if name == "perfect":
        return forward_s + max(parts)
    if name == "forward_is_a_station":
        parts = [forward_s, *parts]
        return sum(parts) / layers + (layers - 1) / layers * max(parts)
    if name == "hides_forward":
        return max(forward_s + parts[0], *parts[1:])
    if name == "one_layer_more":
        return forward_s + sum(parts) / layers + max(parts)
    if name == "starts_forgotten":
        return forward_s + max(parts) + (sum(parts[1:]) / layers if max(parts) != parts[0] else 0)
    return forward_s + sum(parts) / layers + (layers - 1) / layers * max(parts)


def _unit(name: str, time_s: float) -> float:
    return time_s * {"in_ms": 1e3}.get(name, 1.0)


_SENTENCES = {
    "never_overlaps": "nothing overlaps here: with overlap=True a layer's gradient travels while others are made.",
    "always_overlaps": "everything overlaps here: with overlap=False one station waits for the other.",
    "perfect": "this is the slowest station alone: the first layer has yet to reach it, and the last one to leave it.",
    "hides_forward": "forward is hidden here, but there is no gradient before backward begins.",
    "forward_is_a_station": "forward is one of the stations here, but it is over before a gradient is there.",
    "one_layer_more": "the first layer passes all stations, and layers - 1 follow at the slowest one's pace.",
    "starts_forgotten": "the way to the slowest station and from there on is counted for some of the stations only.",
    "no_way_back": "gradients go down, but the new weights, 2 bytes each, must come up again.",
    "wide": "gradients and weights travel in bf16: 2 bytes each, not 4.",
    "state_over_pcie": "Adam's state stays on the host: only gradients and weights cross the PCIe link.",
    "adam_free": "Adam itself is missing: it reads and writes 28 bytes per parameter.",
    "device_adam_free": "with the state on the device Adam has its 28 bytes per parameter too, in HBM.",
    "state_once": "Adam reads its state and writes it back: 12 bytes twice, a gradient of 2, a weight of 2: 28.",
    "state_only": "Adam also reads the gradient and writes the weight: 28 bytes, not the state's 24.",
    "state_only_on_host": "on the host Adam reads the gradient and writes the weight too: 28 bytes, not 24.",
    "gradients_in_dram": "Adam reads the gradient of 2 bytes as well, and writes the weight: 28 bytes.",
    "adam_on_device": "with the state on the host Adam runs there, at the pace of DRAM.",
    "one_way_wire": "down and up share one station here; a PCIe link carries both ways at once.",
    "one_way_disk": "reading and writing share one station here; take them as two.",
    "reads_only": "the state is read from disk, and must be written back.",
    "disk_forgotten": "a state on disk is read and written in every step: 12 bytes each.",
    "master_not_on_disk": "on disk are the two moments and the master: 12 bytes read, and 12 written, not 8.",
    "disk_on_device": "with the state on disk Adam runs on the host too: gradients go down the PCIe link, weights up.",
    "in_ms": "this is in milliseconds; seconds are asked for.",
}
