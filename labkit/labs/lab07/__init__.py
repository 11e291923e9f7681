"""Lab 07, pipeline parallel: its exercises. Each one's judge stands in a module of its own. Left out: solutions."""

from labkit.check.exercise import Exercise
from labkit.labs.lab07 import gpipe, one_f_one_b

EXERCISES: tuple[Exercise, ...] = (
    Exercise("7.2", "gpipe", "All forwards, then all backwards", minutes=15, points=3, judge=gpipe.judge),
    Exercise("7.3", "one_f_one_b", "One forward, one backward", minutes=20, points=4, judge=one_f_one_b.judge),
)
