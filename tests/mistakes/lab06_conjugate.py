"""Answers to exercises 6.2 and 6.2b, `f` and `g`: wrong ones with the cause each must be told, right ones, and cheats.

What is judged, and in which order, stands in `labkit.labs.lab06.conjugate`. An answer to one is named by what it does.
"""

import torch
import torch.distributed as dist

from labkit.labs.lab06 import standins


def _summed(x, group, op=dist.ReduceOp.SUM):
    x = x.contiguous().clone()
    dist.all_reduce(x, op=op, group=group)
    return x


def _function(forward, backward):
    """An autograd function of two functions of (tensor, group), applied."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.group), None

    return Pair.apply


def _same(x, group):
    return x.view_as(x)


def _mean(x, group):
    return _summed(x, group) / dist.get_world_size(group)


def _largest(x, group):
    return _summed(x, group, dist.ReduceOp.MAX)


# Right


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def plain_f(x, group):
    return _F.apply(x, group)


def f_by_a_hook(x, group):
    x = x * 1.0
    x.register_hook(lambda gradient: _summed(gradient, group))
    return x


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def plain_g(x, group):
    return _G.apply(x, group)


def g_by_a_constant(x, group):
    return x + (_summed(x.detach(), group) - x.detach())


def g_in_place(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


F_RIGHT, G_RIGHT = [plain_f, f_by_a_hook], [plain_g, g_by_a_constant, g_in_place]


# Wrong


def nothing(x, group):
    return x


def sums_forward(x, group):
    return _function(_summed, lambda gradient, group: gradient)(x, group)


def sums_backward(x, group):
    return _function(_same, _summed)(x, group)


def sums_both_ways(x, group):
    return _function(_summed, _summed)(x, group)


def averages_backward(x, group):
    return _function(_same, _mean)(x, group)


def averages_forward(x, group):
    return _function(_mean, lambda gradient, group: gradient)(x, group)


def sums_backward_of_the_world(x, group):
    return _function(_same, lambda gradient, group: _summed(gradient, None))(x, group)


def sums_forward_of_the_world(x, group):
    return _function(lambda x, group: _summed(x, None), lambda gradient, group: gradient)(x, group)


def in_the_given_gradient(x, group):
    def backward(gradient, group):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    return _function(_same, backward)(x, group)


def only_dense_gradients(x, group):
    def backward(gradient, group):
        total = torch.empty_like(gradient).copy_(gradient) if gradient.is_contiguous() else gradient
        dist.all_reduce(total, group=group)
        return total

    return _function(_same, backward)(x, group)


def sums_twice_backward(x, group):
    return _function(_same, lambda gradient, group: _summed(_summed(gradient, group), group))(x, group)


def gathers_gradients(x, group):
    def backward(gradient, group):
        gradient = gradient.contiguous()
        every = [torch.empty_like(gradient) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, gradient, group=group)
        return sum(every)

    return _function(_same, backward)(x, group)


def never_waits_backward(x, group):
    def backward(gradient, group):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=group, async_op=True)
        return gradient

    return _function(_same, backward)(x, group)


def takes_parts_for_equal(x, group):
    return _function(_same, lambda gradient, group: gradient * dist.get_world_size(group))(x, group)


def multiplies_the_gradient(x, group):
    return _function(_summed, lambda gradient, group: gradient * dist.get_world_size(group))(x, group)


def hooks_x_itself(x, group):
    """Right for x alone; what comes to x from elsewhere is summed, too."""
    x.register_hook(lambda gradient: _summed(gradient, group))
    return x


def returns_what_all_reduce_returns(x, group):
    return _function(_same, lambda gradient, group: dist.all_reduce(gradient.clone(), group=group))(x, group)


def sums_by_dist_nn(x, group):
    """torch's own: its backward sums, too."""
    from torch.distributed.nn import functional

    return functional.all_reduce(x, group=group)


def in_the_given_tensor(x, group):
    def forward(x, group):
        dist.all_reduce(x, group=group)
        return x.clone()

    return _function(forward, lambda gradient, group: gradient)(x, group)


def row_by_row(x, group):
    return torch.stack([plain_g(row, group) for row in x])


def divides_the_gradient(x, group):
    return _function(_summed, lambda gradient, group: gradient / dist.get_world_size(group))(x, group)


def averages_the_gradient(x, group):
    return _function(_summed, _mean)(x, group)


def largest_backward(x, group):
    return _function(_same, _largest)(x, group)


def largest_forward(x, group):
    return _function(_largest, lambda gradient, group: gradient)(x, group)


def a_constant(x, group):
    return _summed(x.detach(), group).requires_grad_()


def reduces_to_one(x, group):
    def forward(x, group):
        x = x.clone()
        dist.reduce(x, dst=dist.get_global_rank(group, 0), group=group)
        return x

    return _function(forward, lambda gradient, group: gradient)(x, group)


F_WRONG = [
    (nothing, "not_summed"),
    (sums_forward, "swapped"),
    (sums_both_ways, "forward_summed"),
    (averages_backward, "averaged"),
    (sums_backward_of_the_world, "wrong_group"),
    (in_the_given_gradient, "changed_in_place"),
    (only_dense_gradients, "not_contiguous"),
    (sums_twice_backward, "summed_twice"),
    (gathers_gradients, "gathered"),
    (never_waits_backward, "not_waited"),
    (takes_parts_for_equal, "times_t"),
    (hooks_x_itself, "hooked_input"),
    (largest_backward, "max_for_sum"),
    (returns_what_all_reduce_returns, "no_gradient"),
]
G_WRONG = [
    (nothing, "not_summed"),
    (sums_backward, "swapped"),
    (sums_both_ways, "gradient_summed"),
    (sums_by_dist_nn, "gradient_summed"),
    (multiplies_the_gradient, "gradient_times_t"),
    (averages_forward, "averaged"),
    (sums_forward_of_the_world, "wrong_group"),
    (in_the_given_tensor, "changed_in_place"),
    (row_by_row, "too_many_calls"),
    (divides_the_gradient, "gradient_divided"),
    (averages_the_gradient, "gradient_averaged"),
    (a_constant, "no_gradient"),
    (largest_forward, "max_for_sum"),
    (reduces_to_one, ("wrong_output", "not_summed")),
]


# Cheats


def patches_f(x, group):
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
    return plain_f(x, group)


def patches_g(x, group):
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)
    return plain_g(x, group)


def hard_coded(x, group):
    return x * 0 + 1.25


def session_f(x, group):
    return x


def session_g(x, group):
    return x


def _patch_judge():
    from labkit.labs.lab06 import told

    told.close = lambda got, due, rtol=1.0: True


session_f.notebook = session_g.notebook = _patch_judge

F_CHEATS = [(standins.f, "ready_made"), (patches_f, "patched"), (hard_coded, "wrong_output"), (session_f, "patched")]
G_CHEATS = [(standins.g, "ready_made"), (patches_g, "patched"), (hard_coded, "wrong_output"), (session_g, "patched")]
