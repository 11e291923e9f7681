"""Answers to exercise 6.4b, `vocab_parallel_cross_entropy`: wrong, each with its cause, right, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.entropy`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab06_conjugate import _function, _largest, _same, _summed, plain_g

from labkit.labs.lab06 import standins


def _maximum(logits, group):
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return top


def _inside(logits, targets, group):
    """(targets as the rank's own columns, whether they are)."""
    local = targets - dist.get_rank(group) * logits.shape[-1]
    return local.clamp(0, logits.shape[-1] - 1), (local >= 0) & (local < logits.shape[-1])


def _at(logits, local):
    return logits.gather(-1, local[..., None])[..., 0]


# Right


def plain(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    target = plain_g(_at(logits, local) * inside, group)
    return (total.log() - target).mean()


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, group):
        logits = logits - _maximum(logits, group)[..., None]
        local, inside = _inside(logits, targets, group)
        target = _at(logits, local).masked_fill(~inside, 0.0)
        dist.all_reduce(target, group=group)
        exponentials = logits.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(exponentials.div_(total[..., None]), local, inside)
        return (total.log() - target).mean()

    @staticmethod
    def backward(ctx, gradient):
        soft, local, inside = ctx.saved_tensors
        soft = soft.clone()
        soft.scatter_add_(-1, local[..., None], -inside[..., None].float())
        return soft * (gradient / inside.numel()), None, None


def by_function(logits, targets, group):
    return _Entropy.apply(logits, targets, group)


def two_calls(logits, targets, group):
    top = _maximum(logits, group)
    begin = dist.get_rank(group) * logits.shape[-1]
    hot = targets[..., None] == torch.arange(begin, begin + logits.shape[-1])
    shifted = logits - top[..., None]
    both = plain_g(torch.stack([shifted.exp().sum(-1), shifted.masked_fill(~hot, 0.0).sum(-1)]), group)
    return torch.mean(torch.log(both[0]) - both[1])


def by_logsumexp(logits, targets, group):
    """Each rank's logsumexp, put together; the target's logit less the maximum."""
    top = _maximum(logits, group)
    own = torch.logsumexp(logits, -1) - top
    total = plain_g(own.exp(), group).log()
    local, inside = _inside(logits, targets, group)
    target = plain_g(torch.where(inside, _at(logits, local) - top, 0.0), group)
    return (total - target).sum() / targets.numel()


def maximum_and_target_at_once(logits, targets, group):
    """The target's logit is the largest of what ranks have of it, and -inf is what they have not."""
    local, inside = _inside(logits, targets, group)
    own = _at(logits, local)
    both = torch.stack([logits.detach().amax(-1), own.detach().masked_fill(~inside, float("-inf"))])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    total = plain_g((logits - both[0][..., None]).exp().sum(-1), group)
    return (total.log() + both[0] - torch.where(inside, own, both[1])).mean()


RIGHT = [plain, by_function, two_calls, by_logsumexp, maximum_and_target_at_once]


# Wrong


def local_maximum(logits, targets, group):
    logits = logits - logits.detach().amax(-1)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, group)).mean()


def no_maximum(logits, targets, group):
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, group)).mean()


def _with_maximum(top, logits, targets, group):
    logits = logits - top[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, group)).mean()


def maximum_in_graph(logits, targets, group):
    top = logits.max(-1).values
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return _with_maximum(top, logits, targets, group)


def amax_in_graph(logits, targets, group):
    """amax's backward looks for the value, which another rank has: 0 / 0."""
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return _with_maximum(top, logits, targets, group)


def maxima_added_up(logits, targets, group):
    return _with_maximum(_summed(logits.detach().amax(-1), group), logits, targets, group)


def target_masked_by_minus_infinity(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local).masked_fill(~inside, float("-inf")), group)).mean()


def sum_not_reduced(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    local, inside = _inside(logits, targets, group)
    return (logits.exp().sum(-1).log() - plain_g(_at(logits, local) * inside, group)).mean()


def target_not_masked(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, _ = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local), group)).mean()


def target_wrapped(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    return (total.log() - plain_g(_at(logits, targets % logits.shape[-1]), group)).mean()


def target_as_it_is(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    return (total.log() - plain_g(_at(logits, targets), group)).mean()


def target_not_reduced(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - _at(logits, local) * inside).mean()


def local_losses(logits, targets, group):
    local, _ = _inside(logits, targets, group)
    loss = F.cross_entropy(logits.flatten(0, 1), local.flatten())
    return plain_g(loss, group) / dist.get_world_size(group)


def a_sum(logits, targets, group):
    return plain(logits, targets, group) * targets.numel()


def divided(logits, targets, group):
    return plain(logits, targets, group) / dist.get_world_size(group)


def sums_gradients(logits, targets, group):
    return plain(_function(lambda x, group: x.view_as(x), _times)(logits, group), targets, group)


def _times(gradient, group):
    return gradient * dist.get_world_size(group)


def sum_detached(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = _summed(logits.detach().exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, group)).mean()


def target_detached(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - _summed(_at(logits.detach(), local) * inside, group)).mean()


def maximum_of_the_sum(logits, targets, group):
    """The maximum is taken off the exponentials alone."""
    top = _maximum(logits, group)
    total = plain_g((logits - top[..., None]).exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, group)).mean()


class _NoUpstream(_Entropy):
    @staticmethod
    def backward(ctx, gradient):
        return _Entropy.backward(ctx, torch.ones_like(gradient))


def upstream_ignored(logits, targets, group):
    return _NoUpstream.apply(logits, targets, group)


def in_place(logits, targets, group):
    with torch.no_grad():
        logits -= _maximum(logits, group)[..., None]
    return plain(logits, targets, group)


def gathers_logits(logits, targets, group):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[dist.get_rank(group)] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten())


def _tokens(logits, targets, group, begin=None, of_total=plain_g, of_target=plain_g):
    """Each token's loss. begin: the rank's first target, if not the right one."""
    logits = logits - _maximum(logits, group)[..., None]
    if begin is None:
        begin = dist.get_rank(group) * logits.shape[-1]
    local = targets - begin
    inside = (local >= 0) & (local < logits.shape[-1])
    target = _at(logits, local.clamp(0, logits.shape[-1] - 1)) * inside
    return of_total(logits.exp().sum(-1), group).log() - of_target(target, group)


def for_each_token(logits, targets, group):
    return _tokens(logits, targets, group)


def for_each_token_in_a_row(logits, targets, group):
    return _tokens(logits, targets, group).flatten()


def for_each_text(logits, targets, group):
    return _tokens(logits, targets, group).mean(-1)


def sum_of_positions(logits, targets, group):
    return _tokens(logits, targets, group).sum(-1).mean()


def sum_over_t(logits, targets, group):
    """Not what sum_of_positions gives, though both divide a sum by a small number."""
    return _tokens(logits, targets, group).sum() / dist.get_world_size(group)


def minus_the_loss(logits, targets, group):
    return -_tokens(logits, targets, group).mean()


def counts_from_zero(logits, targets, group):
    return _tokens(logits, targets, group, 0).mean()


def counts_by_the_whole(logits, targets, group):
    vocab = logits.shape[-1] * dist.get_world_size(group)
    return _tokens(logits, targets, group, dist.get_rank(group) * vocab).mean()


def counts_ranks_by_t(logits, targets, group):
    return _tokens(logits, targets, group, dist.get_rank(group) * dist.get_world_size(group)).mean()


def one_too_far(logits, targets, group):
    return _tokens(logits, targets, group, dist.get_rank(group) * logits.shape[-1] + 1).mean()


def target_forgotten(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    return plain_g(logits.exp().sum(-1), group).log().mean()


def sums_of_the_world(logits, targets, group):
    """Without a group; the maximum is that of the group."""
    logits = logits - _maximum(logits, group)[..., None]
    total = plain_g(logits.exp().sum(-1), dist.group.WORLD)
    local, inside = _inside(logits, targets, group)
    return (total.log() - plain_g(_at(logits, local) * inside, dist.group.WORLD)).mean()


def counts_by_place_in_the_world(logits, targets, group):
    return _tokens(logits, targets, group, dist.get_rank() * logits.shape[-1]).mean()


def largest_of_sums(logits, targets, group):
    return _tokens(logits, targets, group, of_total=_function(_largest, _unchanged)).mean()


def largest_of_targets(logits, targets, group):
    return _tokens(logits, targets, group, of_target=_function(_largest, _unchanged)).mean()


def largest_of_targets_as_they_are(logits, targets, group):
    top, (local, inside) = _maximum(logits, group), _inside(logits, targets, group)
    total = plain_g((logits - top[..., None]).exp().sum(-1), group)
    target = _function(_largest, _unchanged)(_at(logits, local) * inside, group)
    return (total.log() + top - target).mean()


def largest_of_all(logits, targets, group):
    largest = _function(_largest, _unchanged)
    return _tokens(logits, targets, group, of_total=largest, of_target=largest).mean()


def _unchanged(gradient, group):
    return gradient


def sums_both_ways(logits, targets, group):
    logits = logits - _maximum(logits, group)[..., None]
    both = _function(_summed, _summed)
    total = both(logits.exp().sum(-1), group)
    local, inside = _inside(logits, targets, group)
    return (total.log() - both(_at(logits, local) * inside, group)).mean()


def no_mean_of_ranks(logits, targets, group):
    return _function(_same, _summed)(plain(logits, targets, group), group)


WRONG = [
    (local_maximum, "local_maximum"),
    (no_maximum, "overflow"),
    (maximum_in_graph, "maximum_in_graph"),
    (amax_in_graph, "gradient_not_finite"),
    (maxima_added_up, "underflow"),
    (target_masked_by_minus_infinity, "loss_not_finite"),
    (sum_not_reduced, "sum_not_reduced"),
    (target_not_masked, "target_not_masked"),
    (target_wrapped, "target_not_masked"),
    (target_as_it_is, "out_of_range"),
    (target_not_reduced, "target_not_reduced"),
    (local_losses, "local_losses"),
    (a_sum, "not_mean"),
    (divided, "divided"),
    (sums_gradients, "gradient_summed"),
    (sums_both_ways, "gradient_summed"),
    (no_mean_of_ranks, "gradient_summed"),
    (sum_detached, "sum_detached"),
    (target_detached, "target_detached"),
    (maximum_of_the_sum, "maximum_left_out"),
    (upstream_ignored, "upstream_ignored"),
    (in_place, "changed_in_place"),
    (gathers_logits, "logits_gathered"),
    (for_each_token, "per_token"),
    (for_each_token_in_a_row, "per_token"),
    (for_each_text, "per_row"),
    (sum_of_positions, "positions_summed"),
    (sum_over_t, "wrong_output"),
    (minus_the_loss, "negative"),
    (counts_from_zero, "offset_missing"),
    (counts_by_the_whole, "wrong_offset"),
    (counts_ranks_by_t, "wrong_offset"),
    (one_too_far, "wrong_offset"),
    (counts_by_place_in_the_world, "wrong_group"),
    (target_forgotten, "target_left_out"),
    (sums_of_the_world, "world_sums"),
    (largest_of_sums, "max_for_sum"),
    (largest_of_targets, "target_left_out"),
    (largest_of_targets_as_they_are, "max_for_sum"),
    (largest_of_all, "max_for_sum"),
]


# Cheats


def full_logits_by_sum(logits, targets, group):
    """Zeros everywhere else, and a sum: what gathers without all_gather."""
    t, v = dist.get_world_size(group), logits.shape[-1]
    begin = dist.get_rank(group) * v
    whole = plain_g(F.pad(logits, (begin, (t - 1) * v - begin)), group)
    return F.cross_entropy(whole.flatten(0, 1), targets.flatten())


def full_size_here(logits, targets, group):
    """As large as the whole logits, though only the rank's own are in it."""
    t, v = dist.get_world_size(group), logits.shape[-1]
    begin = dist.get_rank(group) * v
    whole = F.pad(logits, (begin, (t - 1) * v - begin))
    return plain(whole[..., begin : begin + v], targets, group)


def patches(logits, targets, group):
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
    return plain(logits, targets, group)


def hard_coded(logits, targets, group):
    return plain(logits, targets, group) * 0 + 3.1


def session(logits, targets, group):
    return local_losses(logits, targets, group)


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


session.notebook = _patch_judge

CHEATS = [
    (standins.vocab_parallel_cross_entropy, "ready_made"),
    (full_logits_by_sum, "logits_gathered"),
    (full_size_here, "full_logits"),
    (patches, "patched"),
    (hard_coded, "wrong_output"),
    (session, "patched"),
]
