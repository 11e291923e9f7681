"""The small Llama cut into pipeline stages: embedding with the first, norm and head with the last.

A stage takes hidden states (b, s, h) and gives hidden states, the last one logits; the first one's `enter` makes them
of tokens. Parameters keep their names of the whole model. Left out: a cut by cost (`labkit.cost.shapes.stage_layers`
says how layers are shared out).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from labkit.cost.shapes import stage_layers
from labkit.model.llama import Llama, Shape, rotary
from labkit.model.split import accumulate
from labkit.schedule.actions import Schedule

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class LlamaStage(nn.Module):
    """Stage `stage` of `num_stages` of a Llama, made of the same modules: what is done to one is done to the other."""

    def __init__(self, whole: Llama, stage: int, num_stages: int):
        super().__init__()
        self.shape = whole.shape
        shares = stage_layers(self.shape.layers, num_stages)
        first = sum(shares[:stage])
        # Names such as layers.3.mlp stay what they are.
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(first, first + shares[stage])})
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            self.embed_tokens = whole.embed_tokens
        if self.is_last:
            self.norm, self.lm_head = whole.norm, whole.lm_head

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (b, s) to hidden states; for the first stage."""
        return self.embed_tokens(tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(x.shape[1], self.shape.head_dim, self.shape.rope_theta, x.device)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x)) if self.is_last else x


def stages_of(whole: Llama, schedule: Schedule, rank: int) -> dict[int, LlamaStage]:
    """The stages that a rank has, by their numbers in the schedule. ValueError for more stages than layers.

    A tied weight that the rank needs twice, and what two copies of the model have in common there, is one parameter.
    """
    num_stages = schedule.num_stages
    return {stage: LlamaStage(whole, stage % num_stages, num_stages) for stage in schedule.stages_of(rank)}


def named(stages: Mapping[int, nn.Module], tied: bool = False) -> dict[str, nn.Parameter]:
    """A rank's parameters by their names of the whole model; tied: the head's weight goes by the embedding's name."""
    found = {}
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            found[EMBEDDING if tied and name == HEAD else name] = parameter
    return found


def holders(shape: Shape, schedule: Schedule) -> dict[str, tuple[int, ...]]:
    """For each parameter of the whole model, the ranks that have it, in order: several where it is tied across stages
    or the schedule has copies of the model."""
    with torch.device("meta"):
        whole = Llama(shape)
    found: dict[str, list[int]] = {}
    for rank in range(schedule.ranks):
        for name in named(stages_of(whole, schedule, rank), shape.tied):
            found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def sum_shared(parameters: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]], group=None) -> None:
    """Add up the gradients of parameters that several ranks have; afterwards they are equal there.

    parameters: this rank's, by name. Every rank of the group calls it. A parameter without a gradient counts as 0.
    """
    rank, works, came = dist.get_rank(group), [], []
    for name in sorted(parameters):
        others = [other for other in holders[name] if other != rank]
        parameter = parameters[name]
        if others and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        for other in others:
            buffer = torch.empty_like(parameter)
            # A copy is sent: .grad changes while slower ranks have not taken it yet.
            works.append(dist.isend(parameter.grad.clone(), group=group, group_dst=other))
            works.append(dist.irecv(buffer, group=group, group_src=other))
            came.append((parameter, buffer))
    for work in works:
        work.wait()
    for parameter, buffer in came:
        accumulate(parameter, buffer)
