"""Lab 07, pipeline parallel: its exercises, its experiments.

Experiments: `labkit run lab07.schedules` measures five schedules beside theory; `lab07.pipelining` and
`lab07.pipeline_module` are torch's and DeepSpeed's own. Each exercise's judge stands in a module of its own. Left out:
solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab07 import design, gpipe, one_f_one_b, split, tied
from labkit.labs.lab07.experiments import pipeline_module, pipelining, schedules

EXERCISES: tuple[Exercise, ...] = (
    Exercise("7.1", "split_stages", "Layers for every stage", minutes=10, points=2, judge=split.judge),
    Exercise("7.2", "gpipe", "All forwards, then all backwards", minutes=15, points=3, judge=gpipe.judge),
    Exercise("7.3", "one_f_one_b", "One forward, one backward", minutes=20, points=4, judge=one_f_one_b.judge),
    Exercise("7.4", "sum_tied", "One weight at both ends", minutes=10, points=2, judge=tied.judge),
    Exercise("7.5", "beat_1f1b", "A schedule of your own", minutes=30, points=4, judge=design.judge),
)

__all__ = ["EXERCISES", "pipeline_module", "pipelining", "schedules"]
