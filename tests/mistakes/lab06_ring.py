"""Answers to exercise 6.6, `ring_attention`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.ring`. One ring stands here, and what is wrong with it.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from labkit.labs.lab06 import standins


def _place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def _shift(tensors, group, step=1):
    """Each tensor goes to the next rank; what the one before had comes."""
    rank, n = _place(group)
    there, here = (dist.get_global_rank(group, (rank + by) % n) for by in (step, -step))
    come = [torch.empty(tensor.shape) for tensor in tensors]
    works = [dist.isend(tensor.contiguous(), there, group=group) for tensor in tensors]
    works += [dist.irecv(tensor, here, group=group) for tensor in come]
    for work in works:
        work.wait()
    return come


def _halves(*tensors):
    return [tensor.chunk(2, dim=2) for tensor in tensors]


def _chunks(rank, n):
    return rank, 2 * n - 1 - rank


class Ring:
    """One way to do it, a method for each thing that can be wrong."""

    step = 1

    def scale(self, q):
        return q.shape[-1] ** -0.5

    def hops(self, n):
        return n - 1

    def sources(self, rank, n, hop):
        return (rank - self.step * hop) % n

    def blocks(self, rank, source, n):
        """(half of queries, half of keys, whether it is the diagonal) of what is to be computed."""
        queries, keys = _chunks(rank, n), _chunks(source, n)
        return [(a, b, queries[a] == keys[b]) for a in (0, 1) for b in (0, 1) if keys[b] <= queries[a]]

    def scores(self, q, k, diagonal):
        scores = q @ k.transpose(-1, -2) * self.scale(q)
        if diagonal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return scores

    def rescale(self, old, new):
        return (old - new).exp()

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        out = [torch.zeros_like(each) for each in q.chunk(2, dim=2)]
        top = [torch.full((*each.shape[:-1], 1), -1e30) for each in out]
        total = [torch.zeros_like(each) for each in top]
        for hop in range(n):
            source = self.sources(rank, n, hop)
            qs, ks, vs = _halves(q, k, v)
            for a, b, diagonal in self.blocks(rank, source, n):
                scores = self.scores(qs[a], ks[b], diagonal)
                new = torch.maximum(top[a], scores.amax(-1, keepdim=True))
                part, keep = (scores - new).exp(), self.rescale(top[a], new)
                total[a] = total[a] * keep + part.sum(-1, keepdim=True)
                out[a], top[a] = out[a] * keep + part @ vs[b], new
            if hop < self.hops(n):
                k, v = _shift([k, v], group, self.step)
        out = torch.cat([o / t for o, t in zip(out, total, strict=True)], dim=2)
        return out, torch.cat([m + t.log() for m, t in zip(top, total, strict=True)], dim=2)

    def backward(self, q, k, v, out, lse, gradient, group):
        rank, n = _place(group)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (gradient * out).sum(-1, keepdim=True)
        for hop in range(n):
            source = self.sources(rank, n, hop)
            qs, ks, vs, gs, ls, ds = _halves(q, k, v, gradient, lse, delta)
            dqs, dks, dvs = _halves(dq, dk, dv)
            for a, b, diagonal in self.blocks(rank, source, n):
                part = (self.scores(qs[a], ks[b], diagonal) - ls[a]).exp()
                dvs[b].add_(part.transpose(-1, -2) @ gs[a])
                of_scores = part * (gs[a] @ vs[b].transpose(-1, -2) - ds[a]) * self.scale(q)
                dqs[a].add_(of_scores @ ks[b])
                dks[b].add_(of_scores.transpose(-1, -2) @ qs[a])
            k, v, dk, dv = self.on(k, v, dk, dv, hop, n, group)
        return dq, dk, dv

    def on(self, k, v, dk, dv, hop, n, group):
        """What travels after a hop of backward: keys and values but for the last, their gradients home."""
        if hop < n - 1:
            return _shift([k, v, dk, dv], group, self.step)
        return k, v, *_shift([dk, dv], group, self.step)

    def __call__(self, q, k, v, group):
        return _Attention.apply(q, k, v, group, self)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, ring):
        out, lse = ring.forward(q, k, v, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.ring = group, ring
        return out

    @staticmethod
    def backward(ctx, gradient):
        return *ctx.ring.backward(*ctx.saved_tensors, gradient, ctx.group), None, None


# Right


def plain(q, k, v, group):
    return Ring()(q, k, v, group)


class TheOtherWay(Ring):
    step = -1


def the_other_way(q, k, v, group):
    return TheOtherWay()(q, k, v, group)


class OwnPartStays(Ring):
    """Gradients travel n-1 hops: the own queries' part waits at home."""

    def backward(self, q, k, v, out, lse, gradient, group):
        dq, dk, dv = super().backward(q, k, v, out, lse, gradient, group)
        own = self.own.pop(), self.own.pop()
        return dq, dk + own[1], dv + own[0]

    def on(self, k, v, dk, dv, hop, n, group):
        if hop == 0:
            self.own = [dk.clone(), dv.clone()]
            return *_shift([k, v], group), torch.zeros_like(dk), torch.zeros_like(dv)
        return super().on(k, v, dk, dv, hop, n, group)


def own_part_stays(q, k, v, group):
    return OwnPartStays()(q, k, v, group)


class InOneMessage(Ring):
    """k and v in one tensor, the diagonal blocks of the own hop as one product."""

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        kv = torch.stack([k, v])
        places = torch.cat([torch.arange(n * q.shape[2]).chunk(2 * n)[c] for c in _chunks(rank, n)])
        outs, sums = [], []
        for hop in range(n):
            source = (rank - hop) % n
            rows, columns = slice(None), slice(None)
            half = q.shape[2] // 2
            if source > rank:
                rows = slice(half, None)  # only the later chunk of queries sees anything here
            elif source < rank:
                columns = slice(0, half)  # and of these keys only the earlier chunk is seen
            scores = q[:, :, rows] @ kv[0][:, :, columns].transpose(-1, -2) * self.scale(q)
            if hop == 0:
                scores = scores.masked_fill(places[:, None] < places, -math.inf)
            lse = torch.full((*q.shape[:-1], 1), -math.inf)
            part = torch.zeros_like(q)
            lse[:, :, rows] = torch.logsumexp(scores, -1, keepdim=True)
            part[:, :, rows] = scores.softmax(-1) @ kv[1][:, :, columns]
            outs.append(part)
            sums.append(lse)
            if hop < n - 1:
                (kv,) = _shift([kv], group)
        lse = torch.logsumexp(torch.stack(sums), 0)
        return sum(out * (each - lse).exp() for out, each in zip(outs, sums, strict=True)), lse


def in_one_message(q, k, v, group):
    return InOneMessage()(q, k, v, group)


RIGHT = [plain, the_other_way, own_part_stays, in_one_message]


# Wrong


class NoRescaling(Ring):
    def rescale(self, old, new):
        return torch.ones_like(old)


class LocalPositions(Ring):
    """Every block as if the keys were the rank's own."""

    def blocks(self, rank, source, n):
        return super().blocks(rank, rank, n)


class OthersUnmasked(Ring):
    def blocks(self, rank, source, n):
        if source == rank:
            return super().blocks(rank, source, n)
        return [(a, b, False) for a in (0, 1) for b in (0, 1)]


class NoMask(Ring):
    def blocks(self, rank, source, n):
        return [(a, b, False) for a in (0, 1) for b in (0, 1)]


class OwnKeysAlone(Ring):
    def blocks(self, rank, source, n):
        return super().blocks(rank, source, n) if rank == source else []


class LastHopUnused(Ring):
    def blocks(self, rank, source, n):
        return [] if source == (rank + 1) % n else super().blocks(rank, source, n)


class NotScaled(Ring):
    def scale(self, q):
        return 1.0


class MasksWhatItComputed(Ring):
    def blocks(self, rank, source, n):
        queries, keys = _chunks(rank, n), _chunks(source, n)
        return [(a, b, (queries[a], keys[b])) for b in (0, 1) for a in (0, 1)]

    def scores(self, q, k, diagonal):
        of_query, of_key = diagonal
        scores = super().scores(q, k, of_query == of_key)
        return scores if of_key <= of_query else torch.full_like(scores, -math.inf)


class OneHopMore(Ring):
    def hops(self, n):
        return n


class OneHopMoreBackward(Ring):
    def on(self, k, v, dk, dv, hop, n, group):
        return _shift([k, v, dk, dv], group)


class GradientsStayAway(Ring):
    def on(self, k, v, dk, dv, hop, n, group):
        return _shift([k, v, dk, dv], group) if hop < n - 1 else (k, v, dk, dv)


class GradientsNotReturned(Ring):
    """Backward takes the own queries' part alone."""

    def backward(self, q, k, v, out, lse, gradient, group):
        rank, n = _place(group)
        dq, own_k, own_v = super().backward(q, k, v, out, lse, gradient, group)
        return dq, self.first[0], self.first[1]

    def on(self, k, v, dk, dv, hop, n, group):
        if hop == 0:
            self.first = dk.clone(), dv.clone()
        return super().on(k, v, dk, dv, hop, n, group)


class SoftmaxesMixed(Ring):
    def forward(self, q, k, v, group):
        rank, n = _place(group)
        out, lse = Ring.forward(self, q, k, v, group)
        places = [torch.cat([torch.arange(n * q.shape[2]).chunk(2 * n)[c] for c in _chunks(r, n)]) for r in range(n)]
        total = torch.zeros_like(q)
        for hop in range(n):
            source = (rank - hop) % n
            scores = q @ k.transpose(-1, -2) * self.scale(q)
            scores = scores.masked_fill(places[rank][:, None] < places[source], -math.inf)
            total += torch.nan_to_num(scores.softmax(-1) @ v)
            k, v = _shift([k, v], group)
        return total / n, lse


class ViaRankZero(Ring):
    """Every rank sends what it holds to all others."""

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        for other in range(n):
            if other != rank:
                there = dist.get_global_rank(group, other)
                works = [dist.isend(k[:, :1].contiguous(), there, group=group)]
                works.append(dist.irecv(torch.empty_like(k[:, :1]), there, group=group))
                for work in works:
                    work.wait()
        return super().forward(q, k, v, group)


def _of(ring):
    def answer(q, k, v, group):
        return ring()(q, k, v, group)

    answer.__name__ = ring.__name__
    return answer


def kept_by_autograd(q, k, v, group):
    """Hops that autograd knows: all that came is kept for backward."""
    rank, n = _place(group)
    ring = Ring()
    places = [torch.cat([torch.arange(n * q.shape[2]).chunk(2 * n)[c] for c in _chunks(r, n)]) for r in range(n)]
    ks, vs, order = [k], [v], [places[rank]]
    for hop in range(1, n):
        k, v = _Hop.apply(ks[-1], vs[-1], group)
        ks.append(k)
        vs.append(v)
        order.append(places[(rank - hop) % n])
    scores = (q @ torch.cat(ks, 2).transpose(-1, -2)) * ring.scale(q)
    scores = scores.masked_fill(places[rank][:, None] < torch.cat(order), -math.inf)
    return scores.softmax(-1) @ torch.cat(vs, 2)


class _Hop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, group):
        ctx.group = group
        return tuple(_shift([k, v], group))

    @staticmethod
    def backward(ctx, dk, dv):
        return *_shift([dk, dv], ctx.group, -1), None


def sends_first(q, k, v, group):
    rank, n = _place(group)
    there, here = (dist.get_global_rank(group, (rank + by) % n) for by in (1, -1))
    come = torch.empty_like(k)
    dist.send(k.contiguous(), there, group=group)
    dist.recv(come, here, group=group)
    return plain(q, k, v, group)


def receives_first(q, k, v, group):
    rank, n = _place(group)
    there, here = (dist.get_global_rank(group, (rank + by) % n) for by in (1, -1))
    dist.recv(torch.empty_like(k), here, group=group)
    dist.send(k.contiguous(), there, group=group)
    return plain(q, k, v, group)


def last_sends_first(q, k, v, group):
    """One rank goes on where the others wait for a hop more."""
    rank, n = _place(group)
    if rank < n - 1:
        dist.recv(torch.empty_like(k), dist.get_global_rank(group, rank + 1), group=group)
    return plain(q, k, v, group)


class NoDelta(Ring):
    def backward(self, q, k, v, out, lse, gradient, group):
        return super().backward(q, k, v, torch.zeros_like(out), lse, gradient, group)


class NotScaledBack(Ring):
    def backward(self, *given):
        dq, dk, dv = super().backward(*given)
        return dq / self.scale(given[0]), dk / self.scale(given[0]), dv


class GradientsSwapped(Ring):
    def backward(self, *given):
        dq, dk, dv = super().backward(*given)
        return dq, dv, dk


class ValuesForKeys(Ring):
    def forward(self, q, k, v, group):
        return super().forward(q, v, k, group)


WRONG = [
    (_of(GradientsSwapped), "kv_gradients_swapped"),
    (_of(ValuesForKeys), "k_v_swapped"),
    (receives_first, "recv_first"),
    (last_sends_first, "uneven_hops"),
    (_of(NoDelta), "delta_missing"),
    (_of(NotScaledBack), "not_scaled_back"),
    (_of(NoRescaling), "not_rescaled"),
    (_of(LocalPositions), "local_positions"),
    (_of(OthersUnmasked), "others_unmasked"),
    (_of(NoMask), "no_mask"),
    (_of(OwnKeysAlone), "own_only"),
    (_of(LastHopUnused), "hop_missing"),
    (_of(NotScaled), "not_scaled"),
    (_of(MasksWhatItComputed), "masked_work"),
    (_of(OneHopMore), "last_hop"),
    (_of(OneHopMoreBackward), "last_hop"),
    (_of(GradientsStayAway), "kv_not_home"),
    (_of(GradientsNotReturned), "kv_not_returned"),
    (_of(SoftmaxesMixed), "softmaxes_mixed"),
    (_of(ViaRankZero), "not_a_ring"),
    (kept_by_autograd, "all_kept"),
    (sends_first, "deadlock"),
]


# Cheats


def _gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


class Gathers(Ring):
    """All keys and values at once; the ring is for backward alone."""

    def forward(self, q, k, v, group):
        rank, n = _place(group)
        ks, vs = _gather(k, group), _gather(v, group)
        places = [torch.cat([torch.arange(n * q.shape[2]).chunk(2 * n)[c] for c in _chunks(r, n)]) for r in range(n)]
        scores = q @ torch.cat(ks, 2).transpose(-1, -2) * self.scale(q)
        scores = scores.masked_fill(places[rank][:, None] < torch.cat(places), -math.inf)
        return scores.softmax(-1) @ torch.cat(vs, 2), torch.logsumexp(scores, -1, keepdim=True)


def patches(q, k, v, group):
    real = dist.isend
    dist.isend = lambda *args, **kwargs: real(*args, **kwargs)
    return plain(q, k, v, group)


def hard_coded(q, k, v, group):
    return plain(q, k, v, group) * 0 + 0.25


def session(q, k, v, group):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


session.notebook = _patch_judge

CHEATS = [
    (standins.ring_attention, "ready_made"),
    (_of(Gathers), "collective"),
    (patches, "patched"),
    (hard_coded, "wrong_output"),
    (session, "patched"),
]
