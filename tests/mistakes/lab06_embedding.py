"""Answers to exercise 6.4, `VocabParallelEmbedding`: wrong ones with the cause each must be told, right ones, and
cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.embedding`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab06_conjugate import _function, _largest, _summed, plain_g
from torch import nn

from labkit.labs.lab06 import standins

# Right


class Plain(nn.Module):
    def __init__(self, embedding, group):
        super().__init__()
        self.group = group
        self.rank, self.t = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(self.rows(embedding.weight.detach()).clone())
        self.begin = self.rank * len(self.weight)

    def rows(self, table):
        return table.chunk(self.t)[self.rank]

    def own(self, tokens):
        local = tokens - self.begin
        outside = (local < 0) | (local >= len(self.weight))
        return F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside[..., None], 0.0)

    def forward(self, tokens):
        return plain_g(self.own(tokens), self.group)


class OneHot(Plain):
    """A product with a one-hot matrix, in which others' tokens are rows of zeros."""

    def own(self, tokens):
        ids = torch.arange(self.begin, self.begin + len(self.weight))
        return (tokens[..., None] == ids).float() @ self.weight


class OnlyWhatIsHere(Plain):
    """Fills in the rows that are here."""

    def own(self, tokens):
        out = torch.zeros(*tokens.shape, self.weight.shape[1])
        here = (tokens >= self.begin) & (tokens < self.begin + len(self.weight))
        out[here] = self.weight[tokens[here] - self.begin]
        return out

    def forward(self, tokens):
        out = self.own(tokens)
        dist.all_reduce(out, group=self.group)
        return out


class WithARowOfZeros(Plain):
    def own(self, tokens):
        local = (tokens - self.begin).clamp(-1, len(self.weight)) % (len(self.weight) + 1)
        return torch.cat([self.weight, torch.zeros(1, self.weight.shape[1])])[local]


class IsAnEmbedding(nn.Embedding):
    """As Megatron-LM writes it: what is masked is zeroed in place."""

    def __init__(self, embedding, group):
        rank, t = dist.get_rank(group), dist.get_world_size(group)
        rows = embedding.weight.detach().tensor_split(t)[rank].clone()
        super().__init__(len(rows), embedding.embedding_dim, _weight=rows)
        self.begin, self.group = rank * len(rows), group

    def forward(self, tokens):
        mask = (tokens < self.begin) | (tokens >= self.begin + self.num_embeddings)
        local = tokens.clone() - self.begin
        local[mask] = 0
        out = super().forward(local)
        out[mask, :] = 0.0
        return plain_g(out, self.group)


RIGHT = [Plain, OneHot, OnlyWhatIsHere, WithARowOfZeros, IsAnEmbedding]


# Wrong


class NoMask(Plain):
    def own(self, tokens):
        return F.embedding((tokens - self.begin).clamp(0, len(self.weight) - 1), self.weight)


class Wrapped(Plain):
    def own(self, tokens):
        return self.weight[tokens % len(self.weight)]


class MasksTheTokensAlone(Plain):
    def own(self, tokens):
        local = tokens - self.begin
        return self.weight[local * ((local >= 0) & (local < len(self.weight)))]


class AsItIs(Plain):
    def own(self, tokens):
        return F.embedding(tokens, self.weight)


class FirstRowLost(Plain):
    def own(self, tokens):
        out = super().own(tokens)
        return out * (tokens > self.begin)[..., None]


class LastRowLost(Plain):
    def own(self, tokens):
        return super().own(tokens) * (tokens < self.begin + len(self.weight) - 1)[..., None]


class MasksUnseen(Plain):
    def own(self, tokens):
        local = tokens - self.begin
        outside = (local < 0) | (local >= len(self.weight))
        out = F.embedding(local.masked_fill(outside, 0), self.weight)
        out.data[outside] = 0.0
        return out


class NoSum(Plain):
    def forward(self, tokens):
        return self.own(tokens)


class Mean(Plain):
    def forward(self, tokens):
        return plain_g(self.own(tokens), self.group) / self.t


class SumsTheGradient(Plain):
    def forward(self, tokens):
        return _function(_summed, _summed)(self.own(tokens), self.group)


class SumOfTheWorld(Plain):
    def forward(self, tokens):
        return plain_g(self.own(tokens), dist.group.WORLD)


class FirstRows(Plain):
    def rows(self, table):
        return table.chunk(self.t)[0]


class DealtOut(Plain):
    def rows(self, table):
        return table[self.rank :: self.t]


class CutAlongHidden(Plain):
    def rows(self, table):
        return table.chunk(self.t, dim=1)[self.rank]


class AView(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.weight = nn.Parameter(self.rows(embedding.weight.detach()))


class TokenByToken(Plain):
    def forward(self, tokens):
        return torch.stack([plain_g(self.own(row), self.group) for row in tokens])


class LargestRows(Plain):
    def forward(self, tokens):
        return _function(_largest, lambda gradient, group: gradient)(self.own(tokens), self.group)


class ZerosAlone(Plain):
    def own(self, tokens):
        return 0 * super().own(tokens)


class SumOnOneRank(Plain):
    def forward(self, tokens):
        def to_one(x, group):
            x = x.clone()
            dist.reduce(x, dst=dist.get_global_rank(group, 0), group=group)
            return x

        return _function(to_one, lambda gradient, group: gradient)(self.own(tokens), self.group)


class MaskTurnedAround(Plain):
    def own(self, tokens):
        local = tokens - self.begin
        inside = (local >= 0) & (local < len(self.weight))
        return self.weight[local.clamp(0, len(self.weight) - 1)] * ~inside[..., None]


class MaskTurnedAroundAfterwards(Plain):
    """As Megatron-LM writes it, but what is zeroed is the rank's own."""

    def own(self, tokens):
        local = tokens - self.begin
        inside = (local >= 0) & (local < len(self.weight))
        return self.weight[local.masked_fill(~inside, 0)] * ~inside[..., None]


class MasksByMinusInfinity(Plain):
    """For MAX it would do; it is added."""

    def own(self, tokens):
        local = tokens - self.begin
        inside = (local >= 0) & (local < len(self.weight))
        return self.weight[local.clamp(0, len(self.weight) - 1)].masked_fill(~inside[..., None], float("-inf"))


class MasksAfterTheSum(Plain):
    def forward(self, tokens):
        local = tokens - self.begin
        return super().forward(tokens) * ((local >= 0) & (local < len(self.weight)))[..., None]


class CountsFromZero(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin = 0


class CountsRanksByT(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin = self.rank * self.t


class CountsByTheWholeTable(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin = self.rank * embedding.num_embeddings


class CountsByHidden(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin = self.rank * embedding.embedding_dim


class CountsByPlaceInTheWorld(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin = dist.get_rank() * len(self.weight)


class OneTooFar(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.begin += 1


class MasksAndDoesNotShift(Plain):
    def own(self, tokens):
        inside = (tokens >= self.begin) & (tokens < self.begin + len(self.weight))
        return self.weight[tokens.clamp(0, len(self.weight) - 1)] * inside[..., None]


class WrongRowsGiven(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, dist.group.WORLD)


WRONG = [
    (NoMask, "not_masked"),
    (Wrapped, "not_masked"),
    (MasksTheTokensAlone, "not_masked"),
    (AsItIs, "out_of_range"),
    (FirstRowLost, "first_row_lost"),
    (LastRowLost, "last_row_lost"),
    (MasksUnseen, "mask_unseen"),
    (NoSum, "no_all_reduce"),
    (Mean, "averaged"),
    (SumsTheGradient, "gradient_summed"),
    (SumOfTheWorld, "wrong_group"),
    (FirstRows, "first_shard"),
    (DealtOut, "interleaved"),
    (CutAlongHidden, "wrong_dim"),
    (AView, "whole_kept"),
    (TokenByToken, "too_many_calls"),
    (WrongRowsGiven, "wrong_group"),
    (LargestRows, "max_for_sum"),
    (SumOnOneRank, "ranks_differ"),
    (ZerosAlone, "wrong_output"),
    (MaskTurnedAround, "mask_inverted"),
    (MaskTurnedAroundAfterwards, "mask_inverted"),
    (MasksByMinusInfinity, "not_finite"),
    (MasksAfterTheSum, ("ranks_differ", "no_all_reduce")),
    (CountsFromZero, "offset_missing"),
    (CountsRanksByT, "wrong_offset"),
    (CountsByTheWholeTable, "no_row"),
    (CountsByHidden, "other_row"),
    (CountsByPlaceInTheWorld, "wrong_place"),
    (OneTooFar, "other_row"),
    (MasksAndDoesNotShift, "other_row"),
]


# Cheats


class GathersTheTable(Plain):
    def forward(self, tokens):
        parts = [torch.empty_like(self.weight) for _ in range(self.t)]
        dist.all_gather(parts, self.weight.detach(), group=self.group)
        parts[self.rank] = self.weight
        return torch.cat(parts)[tokens]


_WHOLE = {}


class WholeTable(Plain):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        _WHOLE["table"] = embedding.weight.detach()

    def forward(self, tokens):
        out = self.own(tokens)
        return out + (_WHOLE["table"][tokens] - out.detach())


class Patched(Plain):
    def forward(self, tokens):
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
        return super().forward(tokens)


class HardCoded(Plain):
    def forward(self, tokens):
        return super().forward(tokens) * 0 + 0.2


class Session(NoMask):
    """The session's comparison is replaced."""


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


Session.notebook = _patch_judge

CHEATS = [
    (standins.VocabParallelEmbedding, "ready_made"),
    (GathersTheTable, "gathered"),
    (WholeTable, ("missing_call", "whole_kept")),
    (Patched, "patched"),
    (HardCoded, "wrong_output"),
    (Session, "patched"),
]
