"""Lab 04, ZeRO 1, 2, 3: its exercises, its recorded steps, and the data behind its pictures.

Experiments: `labkit run lab04.stages` and `labkit run lab04.switches`, torch's and DeepSpeed's own. Each exercise's
judge stands in a module of its own: `state`, `gradients`, `parameters`, `clip`, `checkpoint`. Left out: solutions.
"""

from labkit.check.exercise import Exercise
from labkit.labs.lab04 import checkpoint, clip, gradients, parameters, recorded, state
from labkit.labs.lab04.experiments import stages, switches
from labkit.labs.lab04.recorded import Step, ddp_way, fsdp_way, record, serial_losses
from labkit.labs.lab04.standins import TorchCheckpoint, TorchZero, freed_way, kept_way, torchs_clip

EXERCISES: tuple[Exercise, ...] = (
    Exercise("4.1", "ZeroOptimizer", "A share of the state", minutes=15, points=3, judge=state.judge),
    Exercise("4.2", "ZeroGradients", "Gradients that do not stay", minutes=12, points=3, judge=gradients.judge),
    Exercise("4.3", "ZeroParameters", "Parameters that come and go", minutes=25, points=4, judge=parameters.judge),
    Exercise("4.4", "clip_grad_norm", "One norm for all shards", minutes=5, points=1, judge=clip.judge),
    Exercise("4.5", "ShardedCheckpoint", "Whole after a crash", minutes=15, points=3, judge=checkpoint.judge),
)

__all__ = [
    "EXERCISES",
    "Step",
    "TorchCheckpoint",
    "TorchZero",
    "ddp_way",
    "fsdp_way",
    "freed_way",
    "kept_way",
    "record",
    "recorded",
    "serial_losses",
    "stages",
    "switches",
    "torchs_clip",
]
