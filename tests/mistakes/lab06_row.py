"""Answers to exercise 6.1b, `RowParallelLinear`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.linear`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab06_column import _patch_judge, _place, _SumBackward
from torch import nn

from labkit.labs.lab06 import standins

# Right


class Row(nn.Module):
    """All_reduce in place: autograd takes it for the identity."""

    def __init__(self, linear, group):
        super().__init__()
        rank, t = _place(group)
        self.group = group
        self.weight = nn.Parameter(linear.weight.detach().chunk(t, dim=1)[rank].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        out = self.product(x)
        dist.all_reduce(out, group=self.group)
        return out if self.bias is None else out + self.bias

    def product(self, x):
        return F.linear(x, self.weight)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowByFunction(Row):
    def forward(self, x):
        out = _Sum.apply(self.product(x), self.group)
        return out if self.bias is None else out + self.bias


class RowWaitsLater(Row):
    def forward(self, x):
        out = x @ self.weight.t()
        work = dist.all_reduce(out, group=self.group, async_op=True)
        work.wait()
        if self.bias is not None:
            out = out + self.bias
        return out


class RowByAddingWhatOthersHave(Row):
    """The sum without this rank's part is a constant to autograd."""

    def forward(self, x):
        out = self.product(x)
        total = out.detach().clone()
        dist.all_reduce(total, group=self.group)
        out = out + (total - out.detach())
        return out if self.bias is None else out + self.bias


RIGHT = [Row, RowByFunction, RowWaitsLater, RowByAddingWhatOthersHave]


# Wrong


class BiasOnEveryRank(Row):
    def forward(self, x):
        out = F.linear(x, self.weight, self.bias)
        dist.all_reduce(out, group=self.group)
        return out


class BiasOnRankZero(Row):
    def forward(self, x):
        out = F.linear(x, self.weight, self.bias if dist.get_rank(self.group) == 0 else None)
        dist.all_reduce(out, group=self.group)
        return out


class BiasSharedOut(Row):
    def forward(self, x):
        out = self.product(x)
        if self.bias is not None:
            out = out + self.bias / dist.get_world_size(self.group)
        dist.all_reduce(out, group=self.group)
        return out


class NoSum(Row):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Mean(Row):
    def forward(self, x):
        out = _Sum.apply(self.product(x), self.group) / dist.get_world_size(self.group)
        return out if self.bias is None else out + self.bias


class NoBias(Row):
    def forward(self, x):
        return _Sum.apply(self.product(x), self.group)


class SumOfTheWorld(Row):
    def forward(self, x):
        out = self.product(x)
        dist.all_reduce(out)
        return out if self.bias is None else out + self.bias


class SumsTheGradient(Row):
    def forward(self, x):
        out = _SumBackward.apply(_Sum.apply(self.product(x), self.group), self.group)
        return out if self.bias is None else out + self.bias


class RowByRows(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t)[rank].clone())


class BiasCut(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().chunk(t)[rank].clone())


class FirstColumns(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.weight.data.copy_(linear.weight.data[:, : self.weight.shape[1]])


class NeverWaits(Row):
    def forward(self, x):
        out = self.product(x)
        dist.all_reduce(out, group=self.group, async_op=True)
        return out if self.bias is None else out + self.bias


class GathersParts(Row):
    def forward(self, x):
        out = self.product(x).contiguous()
        every = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, out.detach(), group=self.group)
        out = out + (sum(every) - out.detach())
        return out if self.bias is None else out + self.bias


class SumsTwice(Row):
    """Rows of the batch one half at a time."""

    def forward(self, x):
        out = torch.cat([_Sum.apply(part, self.group) for part in self.product(x).tensor_split(2)])
        return out if self.bias is None else out + self.bias


class AViewOfColumns(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t, dim=1)[rank])


class BiasDividedWhenKept(Row):
    """Each rank keeps bias/t, to add up to one."""

    def __init__(self, linear, group):
        super().__init__(linear, group)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach() / dist.get_world_size(group))


class BiasDividedAfter(Row):
    def forward(self, x):
        out = _Sum.apply(self.product(x), self.group)
        return out if self.bias is None else out + self.bias / dist.get_world_size(self.group)


class LargestPart(Row):
    def forward(self, x):
        out = self.product(x)
        dist.all_reduce(out.detach(), op=dist.ReduceOp.MAX, group=self.group)
        return out if self.bias is None else out + self.bias


class HalfTheWeight(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.weight.data.div_(2)


class BiasOfWeights(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        if linear.bias is not None:
            self.bias.data.copy_(linear.weight.detach()[:, 0])


WRONG = [
    (BiasOnEveryRank, "bias_t_times"),
    (BiasOnRankZero, "bias_on_one_rank"),
    (BiasSharedOut, "bias_shared_out"),
    (NoSum, "no_all_reduce"),
    (Mean, "averaged"),
    (NoBias, "bias_missing"),
    (SumOfTheWorld, "wrong_group"),
    (SumsTheGradient, "gradient_summed"),
    (RowByRows, "wrong_dim"),
    (BiasCut, "bias_cut"),
    (FirstColumns, "first_shard"),
    (NeverWaits, "not_waited"),
    (GathersParts, "gathered"),
    (SumsTwice, "too_many_calls"),
    (AViewOfColumns, "whole_kept"),
    (BiasDividedWhenKept, "bias_divided"),
    (BiasDividedAfter, "bias_divided"),
    (LargestPart, "max_for_sum"),
    (HalfTheWeight, "scaled"),
    (BiasOfWeights, "other_weight"),
]


# Cheats


class SerialRow(Row):
    """Gathers weights and inputs, and computes as one rank would."""

    def forward(self, x):
        every = []
        for part in (x.detach().flatten(0, -2).t().contiguous(), self.weight.detach().t().contiguous()):
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(parts, part, group=self.group)
            every.append(torch.cat(parts))
        own = self.product(x)
        total = (every[0].t() @ every[1]).view_as(own)
        out = own + (total - own.detach())
        return out if self.bias is None else out + self.bias


class PatchedRow(Row):
    def forward(self, x):
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
        return super().forward(x)


class HardCodedRow(Row):
    def forward(self, x):
        return super().forward(x) * 0 + 1.5


class SessionRow(NoSum):
    """The session's comparison is replaced."""


SessionRow.notebook = _patch_judge

CHEATS = [
    (standins.RowParallelLinear, "ready_made"),
    (SerialRow, "gathered"),
    (PatchedRow, "patched"),
    (HardCodedRow, "wrong_output"),
    (SessionRow, "patched"),
]
