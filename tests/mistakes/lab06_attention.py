"""Answers to exercise 6.3, `ParallelAttention`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.attention`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab06_column import Column
from lab06_conjugate import _function, _largest, _same, _summed, plain_f, plain_g
from lab06_row import RowByFunction
from torch import nn

from labkit.labs.lab06 import standins
from labkit.model.llama import Attention, rotate


def _linear(weight):
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach().clone())
    return made


# Right


class Plain(nn.Module):
    def __init__(self, attention, group, kv_group=None):
        super().__init__()
        self.group, self.kv_group, self.head_dim = group, kv_group, attention.head_dim
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        self.q_proj = _linear(attention.q_proj.weight.chunk(t)[rank])
        kv_heads = attention.k_proj.out_features // attention.head_dim
        self.k_proj = _linear(self.kv(attention.k_proj.weight, kv_heads, rank, t))
        self.v_proj = _linear(self.kv(attention.v_proj.weight, kv_heads, rank, t))
        self.o_proj = _linear(attention.o_proj.weight.chunk(t, dim=1)[rank])

    def kv(self, weight, kv_heads, rank, t):
        parts = min(kv_heads, t)
        return weight.chunk(parts)[rank * parts // t]

    def into(self, x):
        return plain_f(x, self.group)

    def shared(self, weight):
        return weight if self.kv_group is None else plain_f(weight, self.kv_group)

    def out(self, x):
        return plain_g(x, self.group)

    def forward(self, x, cos, sin):
        x = self.into(x)
        q, k = F.linear(x, self.q_proj.weight), F.linear(x, self.shared(self.k_proj.weight))
        v = F.linear(x, self.shared(self.v_proj.weight))
        return self.out(F.linear(self.core(q, k, v, cos, sin), self.o_proj.weight))

    def core(self, q, k, v, cos, sin):
        b, s, _ = q.shape
        q, k, v = (each.view(b, s, -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)


class FromLayers(Plain):
    """Made of 6.1's layers; matmuls and a mask in place of torch's attention; hooks share the KV head's gradient."""

    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        self.q_proj = Column(attention.q_proj, group)
        self.o_proj = RowByFunction(attention.o_proj, group)
        if kv_group is not None:
            for p in (self.k_proj.weight, self.v_proj.weight):
                p.register_hook(lambda gradient: _summed(gradient, kv_group))

    def forward(self, x, cos, sin):
        x = plain_f(x, self.group)
        return self.o_proj(self.core(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin))

    def core(self, q, k, v, cos, sin):
        b, s, _ = q.shape
        q, k, v = (each.view(b, s, -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = q.reshape(b, k.shape[1], -1, s, self.head_dim)
        scores = q @ k[:, :, None].transpose(-1, -2) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        out = (scores.softmax(-1) @ v[:, :, None]).reshape(b, -1, s, self.head_dim)
        return out.transpose(1, 2).reshape(b, s, -1)


class OneCallForBoth(Plain):
    """The gradients of k and v go in one all_reduce."""

    def forward(self, x, cos, sin):
        x = self.into(x)
        both = self.shared(torch.cat([self.k_proj.weight, self.v_proj.weight]))
        k, v = F.linear(x, both).chunk(2, dim=-1)
        q = self.q_proj(x)
        return self.out(self.o_proj(self.core(q, k.contiguous(), v.contiguous(), cos, sin)))


class ByAttentionItself(Attention):
    """labkit's own forward between f and g; the KV head's gradient is summed once it has been added up."""

    def __init__(self, attention, group, kv_group=None):
        nn.Module.__init__(self)
        self.head_dim, self.group = attention.head_dim, group
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        kv_heads = len(attention.k_proj.weight) // self.head_dim
        begin, count = rank * kv_heads // t * self.head_dim, max(1, kv_heads // t) * self.head_dim
        self.q_proj = _linear(attention.q_proj.weight.unflatten(0, (t, -1))[rank])
        self.k_proj = _linear(attention.k_proj.weight.narrow(0, begin, count))
        self.v_proj = _linear(attention.v_proj.weight.narrow(0, begin, count))
        self.o_proj = _linear(attention.o_proj.weight.tensor_split(t, dim=1)[rank])
        for layer in (self.k_proj, self.v_proj) if kv_group is not None else ():
            layer.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=kv_group))

    def forward(self, x, cos, sin):
        return plain_g(super().forward(plain_f(x, self.group), cos, sin), self.group)


class GroupedByEinsum(Plain):
    def core(self, q, k, v, cos, sin):
        b, s, _ = q.shape
        q, k, v = (each.reshape(b, s, -1, self.head_dim).permute(0, 2, 1, 3) for each in (q, k, v))
        q, k = rotate(q, cos, sin).unflatten(1, (k.shape[1], -1)), rotate(k, cos, sin)
        scores = torch.einsum("bhgqd,bhkd->bhgqk", q, k) * self.head_dim**-0.5
        scores = scores + torch.full((s, s), float("-inf")).triu(1)
        return torch.einsum("bhgqk,bhkd->bqhgd", scores.softmax(-1), v).reshape(b, s, -1)


RIGHT = [Plain, FromLayers, OneCallForBoth, ByAttentionItself, GroupedByEinsum]


# Wrong


class NoF(Plain):
    def into(self, x):
        return x


class NoG(Plain):
    def out(self, x):
        return x


class GBothWays(Plain):
    def out(self, x):
        return _function(_summed, _summed)(x, self.group)


class FBothWays(Plain):
    def into(self, x):
        return _function(_summed, _summed)(x, self.group)


class Mean(Plain):
    def out(self, x):
        return plain_g(x, self.group) / dist.get_world_size(self.group)


class FThrice(Plain):
    def forward(self, x, cos, sin):
        q = F.linear(self.into(x), self.q_proj.weight)
        k = F.linear(self.into(x), self.shared(self.k_proj.weight))
        v = F.linear(self.into(x), self.shared(self.v_proj.weight))
        return self.out(F.linear(self.core(q, k, v, cos, sin), self.o_proj.weight))


class FOnQueriesAlone(Plain):
    def forward(self, x, cos, sin):
        q = F.linear(self.into(x), self.q_proj.weight)
        k, v = F.linear(x, self.shared(self.k_proj.weight)), F.linear(x, self.shared(self.v_proj.weight))
        return self.out(F.linear(self.core(q, k, v, cos, sin), self.o_proj.weight))


class FOnKeysAndValues(Plain):
    """f on what the shared weights give, not on them."""

    def forward(self, x, cos, sin):
        x = self.into(x)
        q, k, v = self.q_proj(x), self.shared(self.k_proj(x)), self.shared(self.v_proj(x))
        return self.out(F.linear(self.core(q, k, v, cos, sin), self.o_proj.weight))


class SharesQueries(Plain):
    def forward(self, x, cos, sin):
        x = self.into(x)
        q, k, v = (F.linear(x, self.shared(p.weight)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out(F.linear(self.core(q, k, v, cos, sin), self.o_proj.weight))


class GOnWeights(Plain):
    def shared(self, weight):
        return weight if self.kv_group is None else plain_g(weight, self.kv_group)


class CutsTheGiven(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        attention.q_proj.weight.data = self.q_proj.weight.data


class RepeatsKVHeads(Plain):
    """Head 0, 1, 0, 1 where 0, 0, 1, 1 is due: seen where a rank has more KV heads than one."""

    def core(self, q, k, v, cos, sin):
        def in_turn(x):
            return x.repeat(1, 1, q.shape[-1] // x.shape[-1])

        return super().core(q, in_turn(k), in_turn(v), cos, sin)


class FirstHeads(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        self.q_proj.weight.data.copy_(attention.q_proj.weight.data[: len(self.q_proj.weight)])


class KVOfTheFirst(Plain):
    def kv(self, weight, kv_heads, rank, t):
        return weight[: max(1, kv_heads // t) * self.head_dim]


class KVDealtOut(Plain):
    def kv(self, weight, kv_heads, rank, t):
        parts = min(kv_heads, t)
        return weight.chunk(parts)[rank % parts]


class KVCutInPieces(Plain):
    def kv(self, weight, kv_heads, rank, t):
        return weight.chunk(t)[rank]


class KVWhole(Plain):
    def kv(self, weight, kv_heads, rank, t):
        return weight


class KVAlone(Plain):
    def shared(self, weight):
        return weight


class KVMean(Plain):
    def shared(self, weight):
        def mean(gradient, group):
            return _summed(gradient, group) / dist.get_world_size(group)

        return weight if self.kv_group is None else _function(_same, mean)(weight, self.kv_group)


class KVOverTheGroup(Plain):
    def shared(self, weight):
        return weight if self.kv_group is None else plain_f(weight, self.group)


class OByRows(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        self.o_proj = _linear(attention.o_proj.weight.chunk(t)[rank])


class OfTheWorld(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, dist.group.WORLD, kv_group)


class Views(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        self.q_proj.weight = nn.Parameter(attention.q_proj.weight.detach().chunk(t)[rank])


class Variant(Plain):
    """Plain's core, with something else in the place of each of its parts."""

    def cut(self, x):
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def turned(self, q, k, v, cos, sin):
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def joined(self, out):
        return out.transpose(1, 2).flatten(2)

    def core(self, q, k, v, cos, sin):
        q, k, v = self.turned(*(self.cut(each) for each in (q, k, v)), cos, sin)
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        return self.joined(self.attend(q, k, v))


class NotCausal(Variant):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class NotScaled(Variant):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


class NoRotary(Variant):
    def turned(self, q, k, v, cos, sin):
        return q, k, v


class RotatesQueriesAlone(Variant):
    def turned(self, q, k, v, cos, sin):
        return rotate(q, cos, sin), k, v


class RotatesKeysAlone(Variant):
    def turned(self, q, k, v, cos, sin):
        return q, rotate(k, cos, sin), v


class RotatesValues(Variant):
    def turned(self, *qkv_cos_sin):
        *qkv, cos, sin = qkv_cos_sin
        return [rotate(each, cos, sin) for each in qkv]


class KeysForValues(Variant):
    def turned(self, q, k, v, cos, sin):
        return super().turned(q, v, k, cos, sin)


class CutsHeadsByView(Variant):
    def cut(self, x):
        return x.view(len(x), -1, x.shape[1], self.head_dim)


class JoinsHeadsAsTheyLie(Variant):
    def joined(self, out):
        return out.reshape(len(out), out.shape[2], -1)


class ViewsAlone(CutsHeadsByView, JoinsHeadsAsTheyLie):
    """Nothing is transposed."""


class KeysHaveValuesWeights(Plain):
    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        self.k_proj, self.v_proj = self.v_proj, self.k_proj


class LargestOut(Plain):
    def out(self, x):
        return _function(_largest, lambda gradient, group: gradient)(x, self.group)


class LargestGradient(Plain):
    def into(self, x):
        return _function(_same, _largest)(x, self.group)


class LargestOfShared(Plain):
    def shared(self, weight):
        return weight if self.kv_group is None else _function(_same, _largest)(weight, self.kv_group)


class SumsWeightsOnEveryKV(Plain):
    """f with no group at all sums over the world."""

    def shared(self, weight):
        return plain_f(weight, self.kv_group)


WRONG = [
    (NoF, "no_f"),
    (NoG, "no_g"),
    (GBothWays, "g_backward"),
    (FBothWays, "f_forward"),
    (Mean, "averaged"),
    (FThrice, "f_thrice"),
    (FOnQueriesAlone, "f_beside_kv"),
    (FOnKeysAndValues, "f_on_kv"),
    (SharesQueries, "q_shared"),
    (GOnWeights, "kv_summed_forward"),
    (CutsTheGiven, "changed_in_place"),
    (RepeatsKVHeads, "kv_dealt_out"),
    (FirstHeads, "first_shard"),
    (KVOfTheFirst, "first_shard"),
    (KVDealtOut, "wrong_kv_head"),
    (KVCutInPieces, "kv_head_cut"),
    (KVWhole, "kv_whole"),
    (KVAlone, "kv_not_shared"),
    (KVMean, "kv_mean"),
    (KVOverTheGroup, "kv_all_summed"),
    (OByRows, "wrong_dim"),
    (OfTheWorld, "wrong_group"),
    (Views, "whole_kept"),
    (SumsWeightsOnEveryKV, "kv_all_summed"),
    (NotCausal, "no_mask"),
    (NotScaled, "not_scaled"),
    (NoRotary, "no_rotary"),
    (RotatesQueriesAlone, "k_not_rotated"),
    (RotatesKeysAlone, "q_not_rotated"),
    (RotatesValues, "v_rotated"),
    (KeysForValues, "k_v_swapped"),
    (CutsHeadsByView, "heads_cut_wrongly"),
    (JoinsHeadsAsTheyLie, "heads_not_moved_back"),
    (ViewsAlone, "heads_never_moved"),
    (KeysHaveValuesWeights, "other_weight"),
    (LargestOut, "max_for_sum"),
    (LargestGradient, "max_for_sum"),
    (LargestOfShared, "max_for_sum"),
]


# Cheats


class GathersWeights(Plain):
    """Every rank computes all heads."""

    def forward(self, x, cos, sin):
        out = super().forward(x, cos, sin)
        t, whole = dist.get_world_size(self.group), []
        for layer in (self.q_proj, self.k_proj, self.v_proj):
            parts = [torch.empty_like(layer.weight) for _ in range(t)]
            dist.all_gather(parts, layer.weight.detach(), group=self.group)
            whole.append(torch.cat(parts))
        q, k, v = (F.linear(x.detach(), each) for each in whole)
        return out + 0 * self.core(q, k, v, cos, sin).sum()


_WHOLE = {}


class WholeModel(Plain):
    """The whole attention in a global gives what comes out."""

    def __init__(self, attention, group, kv_group=None):
        super().__init__(attention, group, kv_group)
        _WHOLE["attention"] = attention

    def forward(self, x, cos, sin):
        out = super().forward(x, cos, sin)
        return out + (_WHOLE["attention"](x, cos, sin).detach() - out.detach())


class Patched(Plain):
    def forward(self, x, cos, sin):
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
        return super().forward(x, cos, sin)


class HardCoded(Plain):
    def forward(self, x, cos, sin):
        return super().forward(x, cos, sin) * 0 + 0.5


class Session(NoF):
    """The session's comparison is replaced."""


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


Session.notebook = _patch_judge

CHEATS = [
    (standins.ParallelAttention, "ready_made"),
    (GathersWeights, "gathered"),
    (WholeModel, ("whole_kept", "whole_product")),
    (Patched, "patched"),
    (HardCoded, "wrong_output"),
    (Session, "patched"),
]
