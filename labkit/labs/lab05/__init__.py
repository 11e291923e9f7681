"""Lab 05, Offload: its exercises, its experiments, and the data behind its pictures.

Experiment: `labkit run lab05.copies` measures copies between host and GPU, pinned and not. Each exercise's judge stands
in a module of its own: `offloaded`, `disk`, `step_time`, `pays`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab05 import disk, offloaded, pays, step_time
from labkit.labs.lab05.claims import claims
from labkit.labs.lab05.configurations import Configuration, six
from labkit.labs.lab05.played import Played, lanes, replayed, train
from labkit.labs.lab05.reference import TorchOnDisk, TorchOnHost
from labkit.labs.lab05.runs import adam_bandwidth, copies, copies_table, ram_of, to_files, with_deepspeed
from labkit.labs.lab05.stations import play, step_time_s
from labkit.labs.lab05.sweep import TOKENS, Setup, over_tokens

EXERCISES: tuple[Exercise, ...] = (
    Exercise("5.1", "OffloadedAdam", "The state moves out", minutes=15, points=3, judge=offloaded.judge),
    Exercise("5.2", "DiskAdam", "The state on disk", minutes=15, points=3, judge=disk.judge),
    Exercise("5.3", "offload_step_time", "What a step takes", minutes=10, points=2, judge=step_time.judge),
    Exercise("5.4", "pays_off", "Is it worth it?", minutes=10, points=2, judge=pays.judge),
)

__all__ = [
    "EXERCISES",
    "Configuration",
    "Played",
    "Setup",
    "TOKENS",
    "TorchOnDisk",
    "TorchOnHost",
    "adam_bandwidth",
    "claims",
    "copies",
    "copies_table",
    "lanes",
    "over_tokens",
    "play",
    "ram_of",
    "replayed",
    "six",
    "step_time_s",
    "to_files",
    "train",
    "with_deepspeed",
]
