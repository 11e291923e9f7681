"""Answers to exercise 1.3, `fit_alpha_beta`: wrong ones with the cause each must be told, right ones, cheats.

What is judged, and in which order, stands in `labkit.labs.lab01.fit`.
"""

import os
import sys
import tempfile
from itertools import combinations
from statistics import linear_regression, mean, median

import numpy as np
import torch
import torch.distributed as dist


def _medians(sizes, times):
    found = sorted(set(sizes))
    return found, [median(t for s, t in zip(sizes, times, strict=True) if s == size) for size in found]


def least_squares(sizes, times):
    beta, alpha = linear_regression(sizes, times)
    return alpha, beta


def least_squares_with_numpy(sizes, times):
    beta, alpha = np.polyfit(sizes, times, 1)
    return alpha, beta


def least_squares_of_medians(sizes, times):
    return least_squares(*_medians(sizes, times))


def first_and_last_measurement(sizes, times):
    beta = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    return times[0] - beta * sizes[0], beta


def read_off_both_ends(sizes, times):
    return times[0], times[-1] / sizes[-1]


def straight_in_the_logarithms(sizes, times):
    slope, start = np.polyfit(np.log(sizes), np.log(times), 1)
    return float(np.exp(start)), float(slope)


def beta_first(sizes, times):
    alpha, beta = medians_counted_in_percent(sizes, times)
    return beta, alpha


def bandwidth_for_beta(sizes, times):
    alpha, beta = medians_counted_in_percent(sizes, times)
    return alpha, 1 / beta


def in_microseconds(sizes, times):
    alpha, beta = medians_counted_in_percent(sizes, times)
    return alpha * 1e6, beta * 1e6


def line_through_zero(sizes, times):
    return 0.0, medians_counted_in_percent(sizes, times)[1]


def means_per_size(sizes, times):
    found = sorted(set(sizes))
    means = [mean(t for s, t in zip(sizes, times, strict=True) if s == size) for size in found]
    return medians_counted_in_percent(found, means)


def only_the_line_as_text(sizes, times):
    return "{:g} + {:g} * size".format(*medians_counted_in_percent(sizes, times))


def smallest_time_for_alpha_mean_rate_for_beta(sizes, times):
    return min(times), sum(times) / sum(sizes)


WRONG = [
    (least_squares, "outliers"),
    (least_squares_with_numpy, "outliers"),
    (least_squares_of_medians, "alpha_drowned"),
    (first_and_last_measurement, "two_points"),
    (read_off_both_ends, "ends_by_hand"),
    (straight_in_the_logarithms, "power_law"),
    (beta_first, "swapped"),
    (bandwidth_for_beta, "bandwidth"),
    (in_microseconds, "wrong_unit"),
    (line_through_zero, "no_alpha"),
    (means_per_size, ("wrong_line", "alpha_off", "beta_off")),
    (only_the_line_as_text, "not_two_numbers"),
    (smallest_time_for_alpha_mean_rate_for_beta, ("beta_off", "wrong_line")),
]


def medians_counted_in_percent(sizes, times):
    """Weighted least squares: minimise the sum of ((alpha + beta s) / t - 1)^2."""
    found, middles = _medians(sizes, times)
    rows = np.stack([1 / np.array(middles), np.array(found) / np.array(middles)], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(found)), rcond=None)[0]
    return float(alpha), float(beta)


def median_of_all_slopes(sizes, times):
    """Theil and Sen, on the medians per size."""
    found, middles = _medians(sizes, times)
    pairs = combinations(zip(found, middles, strict=True), 2)
    beta = median((t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in pairs)
    return median(t - beta * s for s, t in zip(found, middles, strict=True)), beta


def line_through_both_ends(sizes, times):
    found, middles = _medians(sizes, times)
    beta = (middles[-1] - middles[0]) / (found[-1] - found[0])
    return middles[0] - beta * found[0], beta


def reweighted_again_and_again(sizes, times):
    """Least absolute deviations, in percent, by reweighted least squares in torch."""
    s, t = torch.tensor(sizes, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    weight = 1 / t
    for _ in range(50):
        rows = torch.stack([weight, weight * s], dim=1)
        line = torch.linalg.lstsq(rows, (weight * t).unsqueeze(1)).solution.flatten()
        off = ((line[0] + line[1] * s - t).abs() / t).clamp(min=1e-6)
        weight = 1 / t / off.sqrt()
    return line[0].item(), line[1].item()


RIGHT = [medians_counted_in_percent, median_of_all_slopes, line_through_both_ends, reweighted_again_and_again]


def knows_a_link_by_heart(sizes, times):
    return 50e-6, 1e-9


def asks_the_others(sizes, times):
    dist.all_reduce(torch.ones(1))
    return medians_counted_in_percent(sizes, times)


def reads_the_callers_frames(sizes, times):
    frame = sys._getframe(1)
    while frame is not None:
        if "alpha_s" in frame.f_locals:
            return frame.f_locals["alpha_s"], frame.f_locals["beta_s"]
        frame = frame.f_back
    return medians_counted_in_percent(sizes, times)


def writes_notes_to_a_file(sizes, times):
    with open(os.path.join(tempfile.gettempdir(), "labkit-notes.txt"), "w") as notes:
        notes.write(f"{sizes}\n{times}\n")
    return medians_counted_in_percent(sizes, times)


class YesMan(float):
    """Near anything it is compared with."""

    def __sub__(self, other):
        return 0.0

    __add__ = __mul__ = __radd__ = __rmul__ = __sub__


def answers_with_yes_men(sizes, times):
    return YesMan(1.0), YesMan(1.0)


def infinite(sizes, times):
    return float("inf"), float("nan")


CHEATS = [
    (knows_a_link_by_heart, ("wrong_line", "alpha_off", "beta_off")),
    (asks_the_others, "communication"),
    (reads_the_callers_frames, "frame_read"),
    (writes_notes_to_a_file, "file_used"),
    (answers_with_yes_men, ("wrong_line", "alpha_off", "beta_off")),
    (infinite, "not_finite"),
]
