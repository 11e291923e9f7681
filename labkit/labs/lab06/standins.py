"""What stands in for exercises of lab 06 that are still stubs, under their own names: torch's DTensor does the work.

A DTensor knows how a tensor lies on the ranks (Shard, Replicate, Partial), and issues the collective that a change
takes. Left out: solutions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from labkit.model import llama


def mesh_of(group: Any, like: Any) -> Any:
    """A DeviceMesh over a group's ranks (None: all), for tensors on the device of `like`."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group if group is not None else dist.group.WORLD, like.device.type)


def moved(x: Any, group: Any, source: Any, target: Any, gradient: Any) -> Any:
    """x, which lies as `source` says, made to lie as `target` says; its gradient arrives as `gradient` says."""
    from torch.distributed.tensor import DTensor

    mesh = mesh_of(group, x)
    whole = DTensor.from_local(x, mesh, [source], run_check=False)
    if source != target:
        whole = whole.redistribute(mesh, [target])
    return whole.to_local(grad_placements=[gradient])


def cut(weight: Any, group: Any, dim: int) -> nn.Parameter:
    """The rank's block of a weight along a dim."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = distribute_tensor(weight.detach(), mesh_of(group, weight), [Shard(dim)], src_data_rank=None)
    return nn.Parameter(whole.to_local().clone())


def f(x: Any, group: Any) -> Any:
    """Replicated forward; the gradient comes Partial, and is made Replicate."""
    from torch.distributed.tensor import Partial, Replicate

    return moved(x, group, Replicate(), Replicate(), Partial())


def g(x: Any, group: Any) -> Any:
    """Partial is made Replicate forward."""
    from torch.distributed.tensor import Partial, Replicate

    return moved(x, group, Partial(), Replicate(), Replicate())


class ColumnParallelLinear(nn.Module):
    """Shard(0) of the weight."""

    def __init__(self, linear: nn.Linear, group: Any):
        super().__init__()
        self.weight = cut(linear.weight, group, 0)
        self.bias = None if linear.bias is None else cut(linear.bias, group, 0)

    def forward(self, x: Any) -> Any:
        """(..., in) to (..., out / t)."""
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Shard(1) of the weight; the product is Partial."""

    def __init__(self, linear: nn.Linear, group: Any):
        super().__init__()
        self.group = group
        self.weight = cut(linear.weight, group, 1)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Any) -> Any:
        """(..., in / t) to (..., out)."""
        out = g(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


class ParallelAttention(llama.Attention):
    """Shard(0) of q, k and v, Shard(1) of o, between f and g."""

    def __init__(self, attention: llama.Attention, group: Any, kv_group: Any = None):
        nn.Module.__init__(self)
        self.head_dim, self.group = attention.head_dim, group
        heads, t = attention.k_proj.out_features // self.head_dim, dist.get_world_size(group)
        for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
            weight = getattr(attention, name).weight
            if name[0] in "kv" and heads < t:
                weight = weight.unflatten(0, (heads, -1)).repeat_interleave(t // heads, 0).flatten(0, 1)
            self.add_module(name, _linear(cut(weight, group, dim)))
        if kv_group is not None:
            for layer in (self.k_proj, self.v_proj):
                layer.weight.register_hook(lambda gradient: summed(gradient, kv_group))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """As Attention's; the ranks' outputs are parts of a sum."""
        return g(self.parts(f(x, self.group), cos, sin), self.group)

    def parts(self, x: Any, cos: Any, sin: Any) -> Any:
        """The rank's own part of the output, and of x's gradient."""
        return super().forward(x, cos, sin)


def summed(gradient: Any, group: Any) -> Any:
    """The sum over a group, as a new tensor."""
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def _linear(weight: nn.Parameter) -> nn.Linear:
    made = nn.Linear(1, 1, bias=False)
    made.weight = weight
    return made


class VocabParallelEmbedding(nn.Module):
    """Shard(0) of the table; DTensor's embedding masks what is not here."""

    def __init__(self, embedding: nn.Embedding, group: Any):
        super().__init__()
        self.group = group
        self.weight = cut(embedding.weight, group, 0)

    def forward(self, tokens: Any) -> Any:
        """(b, s) to (b, s, h)."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = mesh_of(self.group, tokens)
        table = DTensor.from_local(self.weight, mesh, [Shard(0)], run_check=False)
        everywhere = DTensor.from_local(tokens, mesh, [Replicate()], run_check=False)
        return F.embedding(everywhere, table).redistribute(mesh, [Replicate()]).to_local()


def vocab_parallel_cross_entropy(logits: Any, targets: Any, group: Any) -> Any:
    """The mean over tokens; logits (b, s, vocab / t). By torch's loss_parallel."""
    return _given(_loss_and_gradient, logits, targets, group)


def _loss_and_gradient(logits: Any, targets: Any, group: Any) -> tuple[Any, Any]:
    """loss_parallel must be around backward, too: so the gradient is taken at once."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh, own = mesh_of(group, logits), logits.detach().flatten(0, 1).requires_grad_()
    with torch.enable_grad(), loss_parallel():
        whole = DTensor.from_local(own, mesh, [Shard(1)], run_check=False)
        due = DTensor.from_local(targets.flatten(), mesh, [Replicate()], run_check=False)
        loss = F.cross_entropy(whole, due)
        (gradient,) = torch.autograd.grad(loss, own)
    return loss.detach().to_local(), gradient.view_as(logits)


def _given(fn: Any, x: Any, *args: Any) -> Any:
    """fn gives a value and x's gradient at once; here the value, whose backward is that gradient.

    A class of torch's made while a module is loaded is another one each time, and would pass for patched: so here.
    """

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            value, gradient = fn(x, *args)
            ctx.save_for_backward(gradient)
            return value

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return upstream * ctx.saved_tensors[0]

    return Given.apply(x)


def gather(x: Any, group: Any) -> Any:
    """Positions of all ranks (b, s, h) from the rank's own (b, s/t, h); the gradient is Partial, then Shard(1)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return moved(x.contiguous(), group, Shard(1), Replicate(), Partial())


def scatter(x: Any, group: Any) -> Any:
    """The rank's own positions (b, s/t, h) of a sum over ranks (b, s, h)."""
    from torch.distributed.tensor import Partial, Shard

    return moved(x.contiguous(), group, Partial(), Shard(1), Shard(1))


class SequenceParallelMLP(nn.Module):
    """DTensor's Shard(1) to Replicate and back; keep=False has torch's checkpoint gather again, products with it."""

    def __init__(self, norm: llama.RMSNorm, mlp: llama.MLP, group: Any, keep: bool = True):
        super().__init__()
        self.group, self.keep, self.eps = group, keep, norm.eps
        self.norm_weight = nn.Parameter(norm.weight.detach().clone())
        self.norm_weight.register_hook(lambda gradient: summed(gradient, group))
        self.gate, self.up = cut(mlp.gate_proj.weight, group, 0), cut(mlp.up_proj.weight, group, 0)
        self.down = cut(mlp.down_proj.weight, group, 1)

    def forward(self, x: Any) -> Any:
        """(b, s/t, h) to the same."""
        from torch.utils.checkpoint import checkpoint

        normed = F.rms_norm(x, (x.shape[-1],), self.norm_weight, self.eps)
        gate, up = self._products(normed) if self.keep else checkpoint(self._products, normed, use_reentrant=False)
        return scatter(F.linear(F.silu(gate) * up, self.down), self.group)

    def _products(self, x: Any) -> tuple[Any, Any]:
        x = gather(x, self.group)
        return F.linear(x, self.gate), F.linear(x, self.up)


def ring_attention(q: Any, k: Any, v: Any, group: Any) -> Any:
    """torch's attention on gathered keys and values, not sent round: right, and every rank holds all of them."""
    import labkit.labs.lab06.ring_told as ring_told

    n, rank = dist.get_world_size(group), dist.get_rank(group)
    length = n * q.shape[2]
    order = torch.cat([ring_told.positions(each, n, length) for each in range(n)]).to(q.device)
    mine = ring_told.positions(rank, n, length).to(q.device)
    k, v = (gather(each.transpose(1, 2), group).transpose(1, 2) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mine[:, None] >= order)
