"""Lab 01, The price of a collective: its exercises, its experiment, and the data behind its pictures.

Experiment (`labkit run lab01.sweep`, also under torchrun): what nccl-tests prints, for this machine. Each exercise's
judge stands in a module of its own: `ring`, `bandwidth`, `fit`, `hierarchy`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab01 import bandwidth, fit, hierarchy, nccl_log, ring
from labkit.labs.lab01.pictures import by_eye, leaving_picture, sent_picture
from labkit.labs.lab01.sweep import OPS, SIZES, Sweep, measure, sweep, table

EXERCISES: tuple[Exercise, ...] = (
    Exercise("1.1", "ring_all_reduce", "A sum round the ring", minutes=12, points=3, judge=ring.judge),
    Exercise("1.2", "bus_bandwidth", "The speed of a wire", minutes=5, points=1, judge=bandwidth.judge),
    Exercise("1.3", "fit_alpha_beta", "Two numbers for a link", minutes=8, points=2, judge=fit.judge),
    Exercise("1.4", "hierarchical_all_reduce", "Two levels of wire", minutes=15, points=4, judge=hierarchy.judge),
)

__all__ = [
    "EXERCISES",
    "OPS",
    "SIZES",
    "Sweep",
    "by_eye",
    "leaving_picture",
    "measure",
    "nccl_log",
    "sent_picture",
    "sweep",
    "table",
]
