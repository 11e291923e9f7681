"""What known mistakes make of the loss of 6.4b: of all numbers on all ranks, in the parent.

Left out: gradients (`entropy`), and how a loss came about.
"""

from __future__ import annotations

from typing import Any

import labkit.labs.lab06.told as told
from labkit.labs.lab06.functions import in_groups, largest_in_groups
from labkit.labs.lab06.told import Mistake

SENTENCES = {
    "gradient_summed": "the gradient comes t times: a sum's backward passes it on, and nothing sums it again.",
    "target_detached": "the target's logit has no part in the gradient: it takes 1 off its softmax.",
    "sum_detached": "the sum of exponentials has no part in the gradient: that part is the softmax.",
    "local_softmax": "the gradient is made with the rank's own sum of exponentials: divide by that of all.",
    "target_not_masked": "a target outside the rank's range counts here all the same: it must bring 0.",
    "not_mean": "this is the sum over tokens: the loss is their mean.",
    "per_token": "this is a loss for each token: what is due is their mean, one number.",
    "per_row": "this is a loss for each row of the batch: what is due is the mean over all tokens, one number.",
    "positions_summed": "positions are summed, and the mean is over the batch alone: the loss is the mean over both.",
    "negative": "the loss has the wrong sign: it is the log of the sum, less the target's logit.",
    "target_left_out": "nothing comes off the log of the sum: either no rank takes the target for its own, or MAX is "
    "taken over ranks of which all but one have 0, where SUM is due.",
    "max_for_sum": "the largest of the ranks' numbers is taken where their sum is due: MAX is for the maximum alone.",
    "offset_missing": "every rank takes targets 0 to vocab/t - 1 for its own: rank r has those from r * vocab/t on.",
    "wrong_offset": "rank r takes other targets for its own than those from r * vocab/t on: for some tokens another "
    "logit comes off, or none.",
    "world_sums": "sums are taken over the world: give all_reduce group=group.",
    "wrong_group": "the rank's targets are found by its place in the world: dist.get_rank(group) is due.",
    "upstream_ignored": "the gradient that backward is given is not used: multiply by it.",
    "local_maximum": "each rank takes its own maximum off: exponentials add up only with the same one, so MAX first.",
    "sum_not_reduced": "the exponentials of the rank's own logits alone are summed: all_reduce that sum.",
    "target_not_reduced": "the target's logit is known to one rank alone: all_reduce it.",
    "local_losses": "each rank makes a loss of its own logits: the sum over all ranks comes before the log.",
    "divided": "the loss is divided by t: every rank has the loss of all tokens already.",
    "maximum_in_graph": "the maximum has a part in the gradient: it is a constant, so take it of logits.detach().",
    "maximum_left_out": "the maximum is taken off the exponentials and not off the target's logit.",
}


def of_loss(logits: list, targets: list, t: int) -> list[Mistake]:
    """By rank: its logits, and the targets (the same in a group of t)."""
    rows = logits[0].shape[-1]
    local = [y - rank % t * rows for rank, y in enumerate(targets)]
    inside = [(y >= 0) & (y < rows) for y in local]
    tops = [x.amax(-1) for x in logits]
    top = largest_in_groups(tops, t)
    sums = [(x - m[..., None]).exp().sum(-1) for x, m in zip(logits, top, strict=True)]
    all_sums = in_groups(sums, t)
    own_sums = in_groups([(x - m[..., None]).exp().sum(-1) for x, m in zip(logits, tops, strict=True)], t)
    clamped = [_at(y.clamp(0, rows - 1), x) for x, y in zip(logits, local, strict=True)]
    wrapped = [_at(y % rows, x) for x, y in zip(logits, local, strict=True)]
    masked = [each * mask for each, mask in zip(clamped, inside, strict=True)]
    shifted = [(each - m) * mask for each, m, mask in zip(clamped, top, inside, strict=True)]
    shifted_own = [(each - m) * mask for each, m, mask in zip(clamped, tops, inside, strict=True)]
    found = in_groups(masked, t)

    return [
        *_of_local(logits, local, t),
        *told.known(
            SENTENCES,
            ("local_maximum", _losses(own_sums, in_groups(shifted_own, t))),
            ("local_maximum", _losses(own_sums, _less(found, tops))),
            ("sum_not_reduced", _losses(sums, in_groups(shifted, t))),
            ("sum_not_reduced", _losses(sums, _less(found, top))),
            ("target_not_masked", _losses(all_sums, in_groups(_less(clamped, top), t))),
            ("target_not_masked", _losses(all_sums, _less(in_groups(clamped, t), top))),
            ("target_not_masked", _losses(all_sums, in_groups(_less(wrapped, top), t))),
            ("target_not_masked", _losses(all_sums, _less(in_groups(wrapped, t), top))),
            ("target_not_reduced", _losses(all_sums, shifted)),
            ("target_not_reduced", _losses(all_sums, _less(masked, top))),
            ("maximum_left_out", _losses(all_sums, found)),
        ),
        *_of_nothing(all_sums, top),
        *_of_largest(sums, masked, shifted, top, t),
        *_of_world(logits, clamped, inside, tops, t),
        *_of_offset(logits, targets, all_sums, top, t),
        *_of_mean(all_sums, _less(found, top), t),
    ]


def _of_nothing(totals: list, top: list) -> list[Mistake]:
    """The target's logit never comes off; where the maximum is taken off it first, this is what MAX gives, too."""
    zeros = [each * 0 for each in top]
    pairs = (totals, zeros), (totals, _less(zeros, top))
    return told.known(SENTENCES, *(("target_left_out", _losses(*pair)) for pair in pairs))


def _of_world(logits: list, clamped: list, inside: list, tops: list, t: int) -> list[Mistake]:
    """Some or all of what is summed is summed over the world, the maximum being the group's or the world's."""
    world, found = len(logits), []
    for top in (largest_in_groups(tops, t), largest_in_groups(tops, world)):
        sums = [(x - m[..., None]).exp().sum(-1) for x, m in zip(logits, top, strict=True)]
        shifted = [(each - m) * mask for each, m, mask in zip(clamped, top, inside, strict=True)]
        masked = [each * mask for each, mask in zip(clamped, inside, strict=True)]
        for of_sums, of_targets in ((world, t), (t, world), (world, world)):
            parts = in_groups(shifted, of_targets), _less(in_groups(masked, of_targets), top)
            pairs = [("world_sums", _losses(in_groups(sums, of_sums), each)) for each in parts]
            found += told.known(SENTENCES, *pairs) if world > t else []
    return found


def _of_largest(sums: list, masked: list, shifted: list, top: list, t: int) -> list[Mistake]:
    """MAX in place of SUM: for the exponentials, for the target, for both. The largest of what the target's logit is
    below the maximum is 0, of another rank: that is `_of_nothing`."""
    totals, largest = in_groups(sums, t), largest_in_groups(sums, t)
    target, right = _less(largest_in_groups(masked, t), top), _less(in_groups(masked, t), top)
    pairs = (largest, right), (totals, target), (largest, target), (largest, largest_in_groups(shifted, t))
    return told.known(SENTENCES, *(("max_for_sum", _losses(*pair)) for pair in pairs))


def _of_offset(logits: list, targets: list, totals: list, top: list, t: int) -> list[Mistake]:
    """The rank's first target is taken for another than it is. begins: by rank in the group, and in the world."""
    rows, found = logits[0].shape[-1], []
    begins = [
        ("offset_missing", lambda place, rank: 0),
        ("wrong_offset", lambda place, rank: place * rows * t),
        ("wrong_offset", lambda place, rank: place * t),
        ("wrong_offset", lambda place, rank: place * rows + 1),
        ("wrong_offset", lambda place, rank: place * rows - 1),
        ("wrong_group", lambda place, rank: rank * rows),
    ]
    for cause, begin in begins:
        local = [y - begin(rank % t, rank) for rank, y in enumerate(targets)]
        inside = [(y >= 0) & (y < rows) for y in local]
        raw = [_at(y.clamp(0, rows - 1), x) for x, y in zip(logits, local, strict=True)]
        kept = [each * mask for each, mask in zip(raw, inside, strict=True)]
        shifted = [each * mask for each, mask in zip(_less(raw, top), inside, strict=True)]
        for parts in (in_groups(shifted, t), _less(in_groups(kept, t), top)):
            found += told.known(SENTENCES, (cause, _losses(totals, parts)))
    return found


def _of_mean(totals: list, parts: list, t: int) -> list[Mistake]:
    """Everything is right but what is made of the tokens' losses."""
    tokens = [total.log() - part for total, part in zip(totals, parts, strict=True)]
    return told.known(
        SENTENCES,
        ("per_token", tokens),
        ("per_token", [each.flatten() for each in tokens]),
        ("per_row", [each.mean(-1) for each in tokens]),
        ("not_mean", [each.sum() for each in tokens]),
        ("positions_summed", [each.sum(-1).mean() for each in tokens]),
        ("divided", [each.mean() / t for each in tokens]),
        ("negative", [-each.mean() for each in tokens]),
    )


def _at(y: Any, x: Any) -> Any:
    return x.gather(-1, y[..., None])[..., 0]


def _losses(sums: list, parts: list) -> list[Any]:
    return [(total.log() - part).mean() for total, part in zip(sums, parts, strict=True)]


def _less(parts: list, less: list) -> list[Any]:
    """Each part less what belongs to it."""
    return [part - each for part, each in zip(parts, less, strict=True)]


def _of_local(logits: list, local: list, t: int) -> list[Mistake]:
    """A loss of the rank's own logits alone, with targets that are clamped or wrapped into its range."""
    import torch.nn.functional as F

    rows, found = logits[0].shape[-1], []
    for into in (lambda y: y.clamp(0, rows - 1), lambda y: y % rows):
        losses = [F.cross_entropy(x.flatten(0, 1), into(y).flatten()) for x, y in zip(logits, local, strict=True)]
        means = [each / t for each in in_groups(losses, t)]
        found += told.known(SENTENCES, ("local_losses", means), ("local_losses", losses))
    return found
