"""Answers to exercise 6.1, `ColumnParallelLinear`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.linear`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from labkit.labs.lab06 import standins


def _place(group):
    return dist.get_rank(group), dist.get_world_size(group)


# Right


class Column(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        rank, t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t)[rank].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().chunk(t)[rank].clone())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ColumnByRows(nn.Module):
    def __init__(self, linear, group):
        super().__init__()
        rank, t = _place(group)
        n = linear.out_features // t
        rows = slice(rank * n, (rank + 1) * n)
        self.weight = nn.Parameter(torch.empty(n, linear.in_features))
        with torch.no_grad():
            self.weight.copy_(linear.weight[rows])
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias[rows].detach().clone())
        else:
            self.register_parameter("bias", None)

    def forward(self, x):
        out = torch.matmul(x, self.weight.t())
        return out if self.bias is None else out + self.bias


class ColumnIsALinear(nn.Linear):
    def __init__(self, linear, group):
        rank, t = _place(group)
        super().__init__(linear.in_features, linear.out_features // t, bias=linear.bias is not None)
        self.weight.data.copy_(linear.weight.data.tensor_split(t)[rank])
        if linear.bias is not None:
            self.bias.data.copy_(linear.bias.data.tensor_split(t)[rank])


RIGHT = [Column, ColumnByRows, ColumnIsALinear]


# Wrong


class FirstShard(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.weight.data.copy_(linear.weight.data[: len(self.weight)])


class OneSeed(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        torch.manual_seed(0)
        nn.init.normal_(self.weight)


class OwnInit(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        torch.manual_seed(dist.get_rank(group))
        nn.init.normal_(self.weight)


class WrongDim(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t, dim=1)[rank].clone())


class Interleaved(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight.data.copy_(linear.weight.data[rank::t])


class Backwards(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight.data.copy_(linear.weight.data.chunk(t)[t - 1 - rank])


class BiasWhole(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().clone())


class BiasForgotten(Column):
    def forward(self, x):
        return F.linear(x, self.weight)


class OfTheWorld(Column):
    def __init__(self, linear, group):
        super().__init__(linear, dist.group.WORLD)


class RankOfTheWorld(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        t = dist.get_world_size(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t)[dist.get_rank()].clone())


class AView(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        rank, t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().chunk(t)[rank])


class NoParameter(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        weight = self.weight.detach()
        del self.weight
        self.weight = weight.requires_grad_()


class Gathers(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.group = group

    def forward(self, x):
        out = super().forward(x).contiguous()
        every = [torch.empty_like(out) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, out.detach(), group=self.group)
        every[dist.get_rank(self.group)] = out
        return torch.cat(every, dim=-1)


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class WithFInside(Gathers):
    def forward(self, x):
        return Column.forward(self, _SumBackward.apply(x, self.group))


class WholeWeight(Column):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.rank, self.t = _place(group)
        self.weight = nn.Parameter(linear.weight.detach().clone())

    def forward(self, x):
        return F.linear(x, self.weight.chunk(self.t)[self.rank], self.bias)


class Detached(Column):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


WRONG = [
    (FirstShard, "first_shard"),
    (OneSeed, "same_seed"),
    (OwnInit, "own_init"),
    (WrongDim, "wrong_dim"),
    (Interleaved, "interleaved"),
    (Backwards, "other_block"),
    (BiasWhole, "bias_not_cut"),
    (BiasForgotten, "bias_missing"),
    (OfTheWorld, "wrong_group"),
    (RankOfTheWorld, "wrong_group"),
    (AView, "whole_kept"),
    (NoParameter, "not_a_parameter"),
    (Gathers, "gathered_output"),
    (WithFInside, "f_inside"),
    (WholeWeight, "whole_kept"),
    (Detached, "no_gradient"),
]


# Cheats


_WHOLE = {}


class SerialColumn(Column):
    """The whole layer, in a global."""

    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.rank, self.t = _place(group)
        _WHOLE["layer"] = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        _WHOLE["layer"].load_state_dict(linear.state_dict())

    def forward(self, x):
        own = super().forward(x)
        out = _WHOLE["layer"](x).detach().chunk(self.t, dim=-1)[self.rank]
        return own + (out - own.detach())


class PatchedColumn(Column):
    def forward(self, x):
        dist.all_reduce = lambda *args, **kwargs: None
        return super().forward(x)


class ColumnByDTensor(Column):
    """By a name that was bound before anything was watched."""

    def __init__(self, linear, group):
        super().__init__(linear, group)
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = distribute_tensor(linear.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        self.weight = nn.Parameter(whole.to_local().clone())


class HardCodedColumn(Column):
    def forward(self, x):
        return super().forward(x) * 0 + 1.5


class SessionColumn(FirstShard):
    """The session's comparison is replaced."""


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


SessionColumn.notebook = _patch_judge

CHEATS = [
    (standins.ColumnParallelLinear, "ready_made"),
    (ColumnByDTensor, "ready_made"),
    (SerialColumn, ("whole_kept", "whole_product")),
    (PatchedColumn, "patched"),
    (HardCodedColumn, "wrong_output"),
    (SessionColumn, "patched"),
]
