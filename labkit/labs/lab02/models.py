"""Models that lab 02's checks train, built in a rank from a plan that is plain data.

Left out: solutions, and anything parallel. torch is imported when a model is built.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plan:
    """What to build and how to train it.

    llama: arguments of `labkit.model.llama.Shape`, or () for a `Net` of these layers.
    widths: of Net's linear layers, one after the other. branches: how many layers beside them that a batch may use
    or not. dtype, second: of the parameters, and of every other layer's ("" for the same). frozen: numbers of layers
    that do not train. tied: the last layer has the first one's weight. buffers: it has three, one of which is not in
    its state_dict(). used: numbers of layers in the order in which they are used, or () for that of registration.
    returns_state: whether parameters and buffers are sent back; a large model's are not.
    """

    llama: tuple[tuple[str, Any], ...] = ()
    widths: tuple[int, ...] = ()
    branches: int = 0
    dtype: str = "float32"
    second: str = ""
    frozen: tuple[int, ...] = ()
    tied: bool = False
    buffers: bool = False
    used: tuple[int, ...] = ()
    lr: float = 0.1
    returns_state: bool = True


def build(plan: Plan, seed: int) -> torch.nn.Module:
    """The module of a plan, its parameters and buffers drawn from `seed` alone."""
    import torch

    import labkit.labs.lab02.net as net
    from labkit.model import llama

    with torch.random.fork_rng(devices=[]):  # the CPU's alone: asking a GPU's makes a context there
        torch.manual_seed(seed)
        return llama.Llama(llama.Shape(**dict(plan.llama))) if plan.llama else net.Net(plan)


def branches_used(rng: random.Random, branches: int, world_size: int) -> list[list[int]]:
    """Per rank the branches that a step uses: the first nowhere, every other one on some ranks and not on others."""
    used: list[list[int]] = [[] for _ in range(world_size)]
    for branch in range(1, branches):
        for rank in rng.sample(range(world_size), rng.randint(1, world_size - 1)):
            used[rank].append(branch)
    return used


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread meanwhile, as in a rank. On small tensors and a busy machine, far faster too."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def loss_of(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy for targets that are tokens, half the mean square for others."""
    from labkit.model import llama

    if targets.dtype.is_floating_point:
        return (out.to(targets.dtype) - targets).pow(2).mean() / 2
    return llama.loss_of(out, targets)


def state(module: Any) -> dict[str, Any]:
    """Copies of parameters and buffers by name; a tied one under each of its names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: each.detach().clone() for name, each in (*parameters, *module.named_buffers())}


def describe(plan: Plan) -> str:
    """The model in words, for a card."""
    if plan.llama:
        return f"a Llama of {dict(plan.llama)['layers']} layers, hidden {dict(plan.llama)['hidden']}"
    kinds = f"{plan.dtype} and {plan.second}" if plan.second else plan.dtype
    parts = [f"{len(plan.widths) - 1} linear layers of {kinds}"]
    parts += [f"{plan.branches} branches that not every batch uses"] if plan.branches else []
    parts += ["a frozen layer"] if plan.frozen else []
    parts += ["tied weights"] if plan.tied else []
    parts += ["buffers"] if plan.buffers else []
    parts += ["used in another order than registered"] if plan.used else []
    return ", ".join(parts)
