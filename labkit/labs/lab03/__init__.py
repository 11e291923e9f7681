"""Lab 03, Where the memory goes: its exercises, its experiment, and the data behind its pictures.

Experiment: `labkit run lab03.step` records a training step and prints what was held, by kind. Each exercise's judge
stands in a module of its own: `states`, `activations`, `checkpoints`, `scaler`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab03 import activations, checkpoints, claims, fits, gaps, oom, pictures, scaler, states
from labkit.labs.lab03.recorded import Step, record_step, step, time_steps
from labkit.labs.lab03.saved import Kept, kept_by, layer_bytes, llama_keeps, of_layer, table

EXERCISES: tuple[Exercise, ...] = (
    Exercise("3.1", "model_state_bytes", "Sixteen bytes a parameter", minutes=5, points=1, judge=states.judge),
    Exercise("3.2", "activation_bytes", "What a layer keeps", minutes=12, points=3, judge=activations.judge),
    Exercise("3.3", "choose_checkpoints", "Compute it again", minutes=15, points=4, judge=checkpoints.judge),
    Exercise("3.4", "DynamicLossScaler", "Small numbers in sixteen bits", minutes=10, points=2, judge=scaler.judge),
)

__all__ = [
    "EXERCISES",
    "Kept",
    "Step",
    "claims",
    "fits",
    "gaps",
    "kept_by",
    "layer_bytes",
    "llama_keeps",
    "of_layer",
    "oom",
    "pictures",
    "record_step",
    "step",
    "table",
    "time_steps",
]
