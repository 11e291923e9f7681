"""Lab 02, Data parallel: its exercises, its experiments, and the data behind its pictures.

Experiments: `labkit run lab02.scaling` (also under torchrun) gives tokens per second against ranks, `labkit run
lab02.loading` what a step waits for its data. Each exercise's judge stands in a module of its own: `average`,
`bucketed`, `accumulate`, `sampler`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab02 import accumulate, average, bucketed, sampler
from labkit.labs.lab02.loading import SETTINGS, Loading, Setting, load_with, loading, loading_table
from labkit.labs.lab02.pictures import TorchDDP, accumulate_picture, epoch_picture, torchs_average
from labkit.labs.lab02.recorded import Step, lanes, record_step, time_steps
from labkit.labs.lab02.recut import by_formula, efficiencies
from labkit.labs.lab02.scaling import Scaling, efficiency, scaling, table

EXERCISES: tuple[Exercise, ...] = (
    Exercise("2.1", "average_gradients", "One model from four", minutes=6, points=1, judge=average.judge),
    Exercise("2.2", "BucketedDDP", "Buckets that overlap", minutes=20, points=4, judge=bucketed.judge),
    Exercise("2.3", "accumulate", "Small steps, one sum", minutes=10, points=2, judge=accumulate.judge),
    Exercise("2.4", "shard_sampler", "Every sample once", minutes=8, points=2, judge=sampler.judge),
)

__all__ = [
    "EXERCISES",
    "Loading",
    "SETTINGS",
    "Scaling",
    "Setting",
    "Step",
    "TorchDDP",
    "accumulate_picture",
    "by_formula",
    "efficiencies",
    "efficiency",
    "epoch_picture",
    "lanes",
    "load_with",
    "loading",
    "loading_table",
    "record_step",
    "scaling",
    "table",
    "time_steps",
    "torchs_average",
]
