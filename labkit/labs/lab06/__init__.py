"""Lab 06, tensor parallel: its exercises, its recorded steps, and the data behind its pictures.

Each exercise's judge stands in a module of its own. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab06 import attention, conjugate, embedding, entropy, linear, ring, sequence
from labkit.labs.lab06.experiments import autotp, dropout_seeds, parallelize, wires
from labkit.labs.lab06.training import Parts, differences, serial, train, train_ring, train_sequence

EXERCISES: tuple[Exercise, ...] = (
    Exercise("6.1", linear.COLUMN, "Outputs shared out", minutes=5, points=1, judge=linear.judge_column),
    Exercise("6.1b", linear.ROW, "Inputs shared out", minutes=7, points=2, judge=linear.judge_row),
    Exercise("6.2", "f", "Into a parallel region", minutes=6, points=1, judge=conjugate.judge_f),
    Exercise("6.2b", "g", "Out of a parallel region", minutes=6, points=1, judge=conjugate.judge_g),
    Exercise("6.3", attention.NAME, "Heads shared out", minutes=15, points=3, judge=attention.judge),
    Exercise("6.4", embedding.NAME, "A table shared out", minutes=6, points=2, judge=embedding.judge),
    Exercise("6.4b", entropy.NAME, "A loss without its logits", minutes=12, points=3, judge=entropy.judge),
    Exercise("6.5", sequence.NAME, "Positions shared out", minutes=20, points=4, judge=sequence.judge),
    Exercise("6.6", ring.NAME, "Keys go round", minutes=25, points=4, judge=ring.judge),
)

__all__ = [
    "EXERCISES",
    "Parts",
    "autotp",
    "differences",
    "dropout_seeds",
    "parallelize",
    "serial",
    "train",
    "train_ring",
    "train_sequence",
    "wires",
]
