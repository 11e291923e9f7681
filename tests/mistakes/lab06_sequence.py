"""Answers to exercise 6.5, `SequenceParallelMLP`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.sequence`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab06_conjugate import _function, _largest, _same, _summed, plain_f
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.labs.lab06 import standins


def _gathered(x, group, dim=1):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _scattered(x, group, dim=1):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), dim)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, group=group)
    return mine


def _own(x, group, dim=1):
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def gather(x, group):
    return _function(_gathered, _scattered)(x, group)


def scatter(x, group):
    return _function(_scattered, _gathered)(x, group)


class _Again(torch.autograd.Function):
    """Products of what is gathered with a weight; it is gathered again in backward."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(_gathered(x, group), weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        whole = _gathered(x, ctx.group)
        of_weight = gradient.flatten(0, 1).t() @ whole.flatten(0, 1)
        return _scattered(gradient @ weight, ctx.group), of_weight, None


# Right


class Plain(nn.Module):
    def __init__(self, norm, mlp, group, keep=True):
        super().__init__()
        self.group, self.keep, self.eps = group, keep, norm.eps
        self.rank, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.norm_weight = nn.Parameter(norm.weight.detach().clone())
        self.gate = nn.Parameter(self.block(mlp.gate_proj.weight.detach()).clone())
        self.up = nn.Parameter(self.block(mlp.up_proj.weight.detach()).clone())
        self.down = nn.Parameter(self.block(mlp.down_proj.weight.detach(), 1).clone())

    def block(self, weight, dim=0):
        return weight.chunk(self.t, dim)[self.rank]

    def norm(self, x):
        return self.weight_of_norm() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    def weight_of_norm(self):
        return plain_f(self.norm_weight, self.group)

    def into(self, x):
        """gate's and up's products, of all positions."""
        if not self.keep:
            return _Again.apply(x, torch.cat([self.gate, self.up]), self.group).chunk(2, -1)
        x = gather(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)

    def out(self, x):
        return scatter(x, self.group)

    def forward(self, x):
        gate, up = self.into(self.norm(x))
        return self.out(F.linear(F.silu(gate) * up, self.down))


class ByCheckpoint(Plain):
    """torch's checkpoint gathers again, and computes the products again."""

    def into(self, x):
        def products(x):
            x = gather(x, self.group)
            return F.linear(x, self.gate), F.linear(x, self.up)

        return products(x) if self.keep else checkpoint(products, x, use_reentrant=False)


class AlongTheBatch(Plain):
    """An MLP knows no positions, so they may come together along any dim."""

    def into(self, x):
        if not self.keep:
            return super().into(x)
        x = _function(_gathered_rows, _own_rows)(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)

    def out(self, x):
        if not self.keep:
            return super().out(x)
        return _function(_own_rows, _gathered_rows)(x, self.group)


class AllByCheckpoint(Plain):
    """Checkpoint stops before it scatters again: nothing needs that."""

    def forward(self, x):
        def between(x):
            x = gather(x, self.group)
            return self.out(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down))

        x = self.norm(x)
        return between(x) if self.keep else checkpoint(between, x, use_reentrant=False)


RIGHT = [Plain, ByCheckpoint, AlongTheBatch, AllByCheckpoint]


# Wrong


class NormAlone(Plain):
    def weight_of_norm(self):
        return self.norm_weight


class NormMean(Plain):
    def weight_of_norm(self):
        return _function(_same, lambda x, group: _summed(x, group) / self.t)(self.norm_weight, self.group)


class NormOfTheWorld(Plain):
    def weight_of_norm(self):
        return plain_f(self.norm_weight, dist.group.WORLD)


class NormsAllPositions(Plain):
    def forward(self, x):
        def products(x):
            x = self.norm(gather(x, self.group))
            return F.linear(x, self.gate), F.linear(x, self.up)

        gate, up = products(x) if self.keep else checkpoint(products, x, use_reentrant=False)
        return self.out(F.linear(F.silu(gate) * up, self.down))


class AllReduces(Plain):
    def out(self, x):
        return _function(lambda x, group: _own(_summed(x, group), group), _gathered)(x, self.group)


class AllReducesBackward(Plain):
    def into(self, x):
        if not self.keep:
            return super().into(x)
        x = _function(_gathered, lambda x, group: _own(_summed(x, group), group))(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)


class GathersTwice(Plain):
    def into(self, x):
        if not self.keep:
            return super().into(x)
        return F.linear(gather(x, self.group), self.gate), F.linear(gather(x, self.group), self.up)


class AlwaysKeeps(Plain):
    def into(self, x):
        x = gather(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)


class NeverKeeps(Plain):
    def into(self, x):
        return _Again.apply(x, torch.cat([self.gate, self.up]), self.group).chunk(2, -1)


class _AgainAndKept(_Again):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.whole = group, _gathered(x, group)
        return F.linear(ctx.whole, weight)


class GathersAgainAndKeeps(Plain):
    def into(self, x):
        if self.keep:
            return super().into(x)
        return _AgainAndKept.apply(x, torch.cat([self.gate, self.up]), self.group).chunk(2, -1)


class NoReduce(Plain):
    def out(self, x):
        return _function(_own, _gathered)(x, self.group)


class NoReduceBackward(Plain):
    def into(self, x):
        if not self.keep:
            return super().into(x)
        x = _function(_gathered, _own)(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)


class Mean(Plain):
    def out(self, x):
        return scatter(x, self.group) / self.t


class FirstBlock(Plain):
    def block(self, weight, dim=0):
        return weight.chunk(self.t, dim)[0]


class GateByColumns(Plain):
    def __init__(self, norm, mlp, group, keep=True):
        super().__init__(norm, mlp, group, keep)
        self.gate = nn.Parameter(self.block(mlp.gate_proj.weight.detach(), 1).clone())


class Views(Plain):
    def __init__(self, norm, mlp, group, keep=True):
        super().__init__(norm, mlp, group, keep)
        self.up = nn.Parameter(self.block(mlp.up_proj.weight.detach()))


class SumsAgain(Plain):
    def out(self, x):
        return _function(_scattered, lambda x, group: _gathered(x, group) * self.t)(x, self.group)


class UpForGate(Plain):
    def __init__(self, norm, mlp, group, keep=True):
        super().__init__(norm, mlp, group, keep)
        self.gate, self.up = self.up, self.gate


class Variant(Plain):
    """Plain, with something else in the place of what stands between the products."""

    def between(self, gate, up):
        return F.silu(gate) * up

    def forward(self, x):
        return self.out(F.linear(self.between(*self.into(self.norm(x))), self.down))


class GateAndUpSwapped(Variant):
    def between(self, gate, up):
        return gate * F.silu(up)


class NoSilu(Variant):
    def between(self, gate, up):
        return gate * up


class SiluOfAll(Variant):
    def between(self, gate, up):
        return F.silu(gate * up)


class AddsX(Plain):
    def forward(self, x):
        return x + super().forward(x)


class WeightAlone(Plain):
    def norm(self, x):
        return x * self.weight_of_norm()


class NoWeight(Plain):
    def norm(self, x):
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)


class NoEps(Plain):
    def norm(self, x):
        return self.weight_of_norm() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


class ALayerNorm(Plain):
    def norm(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight_of_norm(), eps=self.eps)


def _largest_scattered(x, group):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), 1)]
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, parts, op=dist.ReduceOp.MAX, group=group)
    return mine


class LargestOut(Plain):
    def out(self, x):
        return _function(_largest_scattered, _gathered)(x, self.group)


class LargestGradient(Plain):
    def into(self, x):
        if not self.keep:
            return super().into(x)
        x = _function(_gathered, _largest_scattered)(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)


class LargestOfNorm(Plain):
    def weight_of_norm(self):
        return _function(_same, _largest)(self.norm_weight, self.group)


WRONG = [
    (NormAlone, "norm_not_summed"),
    (NormMean, "norm_mean"),
    (NormOfTheWorld, "wrong_group"),
    (NormsAllPositions, "norm_of_all"),
    (AllReduces, "all_reduce"),
    (AllReducesBackward, "all_reduce"),
    (GathersTwice, "gathered_twice"),
    (AlwaysKeeps, "not_gathered_again"),
    (NeverKeeps, "gathered_again"),
    (GathersAgainAndKeeps, "kept_all_the_same"),
    (NoReduce, "no_reduce"),
    (NoReduceBackward, "no_reduce_backward"),
    (Mean, "averaged"),
    (FirstBlock, "first_shard"),
    (GateByColumns, "wrong_dim"),
    (Views, "whole_kept"),
    (SumsAgain, "gradient_summed"),
    (UpForGate, "other_weight"),
    (GateAndUpSwapped, "gate_up_swapped"),
    (NoSilu, "no_silu"),
    (SiluOfAll, "silu_of_product"),
    (AddsX, "residual"),
    (WeightAlone, "no_norm"),
    (NoWeight, "norm_weight_missing"),
    (NoEps, "eps_missing"),
    (ALayerNorm, "mean_taken_off"),
    (LargestOut, "max_for_sum"),
    (LargestGradient, "max_for_sum"),
    (LargestOfNorm, "max_for_sum"),
]


# Cheats


class GathersWeights(Plain):
    """Each rank computes its own positions with the whole weights."""

    def forward(self, x):
        whole = [_function(_gathered_rows, _own_rows)(w, self.group) for w in (self.gate, self.up, self.down.t())]
        normed = self.norm(x)
        return F.linear(F.silu(F.linear(normed, whole[0])) * F.linear(normed, whole[1]), whole[2].t())


def _gathered_rows(x, group):
    return _gathered(x, group, 0)


def _own_rows(x, group):
    return _scattered(x, group, 0)


class Patched(Plain):
    def forward(self, x):
        real = dist.all_gather
        dist.all_gather = lambda *args, **kwargs: real(*args, **kwargs)
        return super().forward(x)


class HardCoded(Plain):
    def forward(self, x):
        return super().forward(x) * 0 + 0.3


class Session(NormAlone):
    """The session's comparison is replaced."""


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


Session.notebook = _patch_judge

CHEATS = [
    (standins.SequenceParallelMLP, "ready_made"),
    (GathersWeights, ("other_size", "other_calls", "gathered_twice")),
    (Patched, "patched"),
    (HardCoded, "wrong_output"),
    (Session, "patched"),
]
