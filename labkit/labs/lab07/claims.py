"""What widely read guides say that touches pipelines, each with a verdict and the figure that it rests on.

The first of them explains how to train what one GPU cannot hold, and does not mention pipelines at all. Left out:
claims on tensor parallelism (lab 06), and on 3D layouts (lab 08).
"""

from __future__ import annotations

from labkit.cost import hardware, states
from labkit.cost.claims import Claim
from labkit.cost.named import named
from labkit.cost.shapes import layer_parameters
from labkit.labs.lab07.pictures import wire
from labkit.schedule import theory

GPT_3, NODE = 175e9, "DGX H100"  # parameters (arXiv:2005.14165, table 2.1)
STAGES = 8


def claims() -> tuple[Claim, ...]:
    """In the order of this lab."""
    return _past_one_gpu(), _accumulation(), _stage_3_as_well(), _one_after_another()


def _past_one_gpu() -> Claim:
    node = hardware.node(NODE)
    room, need = node.count * node.device.memory_bytes, states.per_parameter().total * GPT_3
    shape = named("llama-3.1-405b")
    figure = f"GPT-3's states are {need / 1e12:.1f} TB, a node of 8 H100 holds {room / 1e12:.2f} TB. Between nodes a "
    figure += f"pipeline sends 1/{wire(shape, 16, 8192).times:,.0f} of what tensor parallel does (llama-3.1-405b)"
    return Claim("tensor parallelism is how to train what one GPU cannot hold", "half right", figure)


def _accumulation() -> Claim:
    p, m = STAGES, 32
    few = theory.idle_share(p, p)
    figure = f"in a pipeline of {p} it fills the bubble: {few:.0%} idle with {p} microbatches, "
    figure += f"{theory.idle_share(p, m):.0%} with {m}; GPipe then keeps activations of {m} at once, 1F1B of {p}"
    return Claim("gradient accumulation is a way to save memory", "half right", figure)


def _stage_3_as_well() -> Claim:
    shape, m = named("llama-3.1-70b"), 32
    each = 2 * layer_parameters(shape) * shape.layers / STAGES
    figure = f"DeepSpeed refuses stages 2 and 3 with a pipeline: each of {m} microbatches would gather a stage's "
    figure += f"{each / 1e9:.0f} GB of weights again, forward and backward: {2 * m * each / 1e12:.1f} TB a step"
    return Claim("turn on ZeRO stage 3 whatever else is parallel", "wrong", figure)


def _one_after_another() -> Claim:
    one, m = theory.idle_share(STAGES, 1), 32
    figure = f"of one batch at a time, {STAGES} stages idle {one:.0%}; with {m} microbatches on their way at once "
    figure += f"{theory.idle_share(STAGES, m):.0%}"
    return Claim("stages process the data one after the other", "half right", figure)
