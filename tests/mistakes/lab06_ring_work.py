"""More answers to exercise 6.6, `ring_attention`, that differ in what they multiply: right ones, and those that work on
what the mask empties, by whatever op.

What is judged, and in which order, stands in `labkit.labs.lab06.ring`; how work is counted, in `ring_work` there.
"""

import math

import torch
import torch.nn.functional as F
from lab06_ring import Ring, _chunks, _halves, _of, _place, _shift

# Right


class ByTorchsKernel(Ring):
    """torch's kernel for a CPU gives a block's output and its log-sum-exp."""

    def hop(self, q, k, v, rank, source, n):
        """(rows of queries, their output, log-sum-exp) by the keys of a source."""
        half = q.shape[2] // 2
        rows = slice(half, None) if source > rank else slice(None)
        seen = slice(0, half) if source < rank else slice(None)
        given = [each.contiguous() for each in (q[:, :, rows], k[:, :, seen], v[:, :, seen])]
        return rows, *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, source == rank)

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        out, lse = torch.zeros_like(q), torch.full((*q.shape[:-1], 1), -math.inf)
        for hop in range(n):
            rows, part, of_part = self.hop(q, k, v, rank, (rank - hop) % n, n)
            before, of_part = lse[:, :, rows], of_part[..., None]
            now = torch.logaddexp(before, of_part)
            out[:, :, rows] = out[:, :, rows] * (before - now).exp() + part * (of_part - now).exp()
            lse[:, :, rows] = now
            if hop < n - 1:
                k, v = _shift([k, v], group)
        return out, lse


class BackwardByAutograd(Ring):
    """Each block again, as autograd knows it."""

    def backward(self, q, k, v, out, lse, gradient, group):
        rank, n = _place(group)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (gradient * out).sum(-1, keepdim=True)
        for hop in range(n):
            qs, ks, vs, gs, ls, ds = _halves(q, k, v, gradient, lse, delta)
            into = _halves(dq, dk, dv)
            for a, b, diagonal in self.blocks(rank, (rank - hop) % n, n):
                with torch.enable_grad():
                    given = [each.detach().requires_grad_() for each in (qs[a], ks[b], vs[b])]
                    part = (self.scores(*given[:2], diagonal) - ls[a]).exp()
                    total = ((part @ given[2]) * gs[a]).sum() - (part.sum(-1, keepdim=True) * ds[a]).sum()
                    found = torch.autograd.grad(total, given)
                for halves, at, each in zip(into, (a, b, b), found, strict=True):
                    halves[at].add_(each)
            k, v, dk, dv = self.on(k, v, dk, dv, hop, n, group)
        return dq, dk, dv


class KernelAndLogSumExp(ByTorchsKernel):
    """The kernel that everyone may call gives no log-sum-exp: scores are made once more for it."""

    def hop(self, q, k, v, rank, source, n):
        half = q.shape[2] // 2
        rows = slice(half, None) if source > rank else slice(None)
        seen = slice(0, half) if source < rank else slice(None)
        q, k, v = q[:, :, rows], k[:, :, seen], v[:, :, seen]
        scores = q @ k.mT * self.scale(q)
        if source == rank:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return rows, F.scaled_dot_product_attention(q, k, v, is_causal=source == rank), scores.logsumexp(-1)


class ScoresTwice(Ring):
    """Once for their maximum, once for the exponentials."""

    def scores(self, q, k, diagonal):
        super().scores(q, k, diagonal).amax(-1)
        return super().scores(q, k, diagonal)


class KernelInDouble(ByTorchsKernel):
    def hop(self, q, k, v, rank, source, n):
        rows, out, lse = super().hop(q.double(), k.double(), v.double(), rank, source, n)
        return rows, out.to(q.dtype), lse.to(q.dtype)


RIGHT = [_of(each) for each in (ByTorchsKernel, BackwardByAutograd, KernelAndLogSumExp, ScoresTwice, KernelInDouble)]


# Wrong


def _places(length, n):
    return [torch.cat([torch.arange(n * length).chunk(2 * n)[c] for c in _chunks(rank, n)]) for rank in range(n)]


class KernelWithAMask(ByTorchsKernel):
    """All keys of every hop, and a mask that takes most of them away again."""

    def hop(self, q, k, v, rank, source, n):
        places = _places(q.shape[2], n)
        mask = torch.zeros(len(places[0]), len(places[0])).masked_fill(places[rank][:, None] < places[source], -1e30)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return slice(None), *kernel(q, k, v, 0.0, False, attn_mask=mask)


class MasksInBackward(Ring):
    """Forward leaves out what is masked, backward works on all of it."""

    def backward(self, q, k, v, out, lse, gradient, group):
        rank, n = _place(group)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta, places = (gradient * out).sum(-1, keepdim=True), _places(q.shape[2], n)
        for hop in range(n):
            scores = q @ k.mT * self.scale(q)
            part = (scores.masked_fill(places[rank][:, None] < places[(rank - hop) % n], -math.inf) - lse).exp()
            of_scores = part * (gradient @ v.mT - delta) * self.scale(q)
            dq += of_scores @ k
            dk += of_scores.mT @ q
            dv += part.mT @ gradient
            k, v, dk, dv = self.on(k, v, dk, dv, hop, n, group)
        return dq, dk, dv


class ScoresForNothing(Ring):
    """Right, and scores of what the mask empties are made besides, and thrown away."""

    def product(self, q, k):
        return torch.einsum("bhqd,bhkd->bhqk", q, k)

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        for hop in range(n):
            (qs, ks), (queries, keys) = _halves(q, k), (_chunks(rank, n), _chunks((rank - hop) % n, n))
            for a, b in ((a, b) for a in (0, 1) for b in (0, 1) if keys[b] > queries[a]):
                self.product(qs[a], ks[b])
        return super().forward(q, k, v, group)


class MultipliesAndSums(ScoresForNothing):
    def product(self, q, k):
        return (q[..., :, None, :] * k[..., None, :, :]).sum(-1)


class RowByRow(ScoresForNothing):
    def product(self, q, k):
        heads = zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)
        return [torch.mv(keys, row) for rows, keys in heads for row in rows]


class NumberByNumber(ScoresForNothing):
    """Outer products of columns, added up."""

    def product(self, q, k):
        total = torch.zeros(*q.shape[:-1], k.shape[-2])
        for at in range(q.shape[-1]):
            total = torch.addcmul(total, q[..., at, None], k[..., None, :, at])
        return total


class AttendsForNothing(ScoresForNothing):
    def product(self, q, k):
        return F.scaled_dot_product_attention(q, k, k)


_WASTEFUL = (KernelWithAMask, MasksInBackward, ScoresForNothing, MultipliesAndSums, RowByRow, NumberByNumber)
WRONG = [(_of(ring), "masked_work") for ring in (*_WASTEFUL, AttendsForNothing)]
