"""Answers to exercise 2.1, `average_gradients`: wrong ones with the cause each must be told, and right ones.

More stand in `lab02_average_more`, cheats in `lab02_cheats`. What is judged, and in which order, stands in
`labkit.labs.lab02.average`.
"""

import lab02_average_more
import torch
import torch.distributed as dist


def _zeros_where_none(model):
    """Trained parameters, each with a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return trained


# Right


def one_by_one(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def divides_first(model):
    for p in _zeros_where_none(model):
        p.grad.div_(dist.get_world_size())
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def in_one_tensor(model):
    trained = _zeros_where_none(model)
    flat = torch.cat([p.grad.flatten() for p in trained])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.copy_(part.view_as(p))


def all_at_once(model):
    """Issues all of them, then waits; gives every parameter a new gradient."""
    works = []
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            works.append((p, grad, dist.all_reduce(grad, async_op=True)))
    for p, grad, work in works:
        work.wait()
        p.grad = grad / dist.get_world_size()


def none_stays_none_where_nobody_has_one(model):
    """Asks first which parameters took part anywhere."""
    trained = [p for p in model.parameters() if p.requires_grad]
    took_part = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
    dist.all_reduce(took_part, op=dist.ReduceOp.MAX)
    for p, anywhere in zip(trained, took_part.tolist(), strict=True):
        if anywhere:
            grad = p.grad if p.grad is not None else torch.zeros_like(p)
            dist.all_reduce(grad)
            p.grad = grad / dist.get_world_size()


def by_reduce_and_broadcast(model):
    for p in _zeros_where_none(model):
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()
        dist.broadcast(p.grad, src=0)


def by_all_gather(model):
    for p in _zeros_where_none(model):
        everyone = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, p.grad)
        p.grad.copy_(torch.stack(everyone).mean(0))


def returns_the_model(model):
    one_by_one(model)
    return model


RIGHT = [
    one_by_one,
    divides_first,
    in_one_tensor,
    all_at_once,
    none_stays_none_where_nobody_has_one,
    by_reduce_and_broadcast,
    by_all_gather,
    returns_the_model,
    *lab02_average_more.RIGHT,
]


# Wrong


def sums(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)


def divides_by_four(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)
        p.grad /= 4


def divides_by_two(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)
        p.grad /= 2


def divides_by_the_others(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size() - 1


def divides_before_and_after(model):
    for p in _zeros_where_none(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def only_divides(model):
    for p in _zeros_where_none(model):
        p.grad /= dist.get_world_size()


def does_nothing(model):
    return None


def averages_a_copy(model):
    for p in _zeros_where_none(model):
        grad = p.grad.clone()
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def mean_is_not_assigned(model):
    """`grad = grad / n` makes a new tensor and leaves the sum in `.grad`."""
    for p in _zeros_where_none(model):
        grad = p.grad
        dist.all_reduce(grad)
        grad = grad / dist.get_world_size()


def averages_parameters(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def takes_a_step_as_well(model):
    one_by_one(model)
    for p in model.parameters():
        if p.grad is not None and p.requires_grad:
            p.data -= 0.1 * p.grad


def first_parameter_only(model):
    p = _zeros_where_none(model)[0]
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def weights_only(model):
    """Biases are forgotten."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.grad is not None:
            dist.all_reduce(module.weight.grad)
            module.weight.grad /= dist.get_world_size()


def reduces_to_rank_zero(model):
    for p in _zeros_where_none(model):
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()


def only_rank_zero_divides(model):
    for p in _zeros_where_none(model):
        dist.all_reduce(p.grad)
        if dist.get_rank() == 0:
            p.grad /= dist.get_world_size()


def broadcasts_rank_zeros(model):
    for p in _zeros_where_none(model):
        dist.broadcast(p.grad, src=0)


def forgets_the_remainder(model):
    """Cuts one flat tensor into equal parts, and what does not divide is left."""
    trained, n = _zeros_where_none(model), dist.get_world_size()
    flat = torch.cat([p.grad.flatten() for p in trained])
    whole = (flat.numel() - 1) // 100 * 100
    for part in flat[:whole].split(100):
        dist.all_reduce(part)
        part /= n
    for p, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad.copy_(part.view_as(p))


def skips_none(model):
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def takes_none_for_a_tensor(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def zeros_that_are_not_kept(model):
    """Joins with zeros, and forgets that the sum is in them."""
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()


def counts_those_that_have_one(model):
    for p in model.parameters():
        if p.requires_grad:
            count = torch.tensor([float(p.grad is not None)])
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(count)
            dist.all_reduce(grad)
            if count.item():
                p.grad = grad / count.to(grad.dtype)


def frozen_as_well(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def clears_frozen(model):
    for p in model.parameters():
        if not p.requires_grad:
            p.grad = None
    one_by_one(model)


def by_size(model):
    """An order that ranks with other gradients do not share."""
    trained = _zeros_where_none(model)
    for p in sorted(trained, key=lambda p: float(p.grad.sum())):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def in_the_order_of_a_set(model):
    for p in set(_zeros_where_none(model)):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def in_half_precision(model):
    for p in _zeros_where_none(model):
        narrow = p.grad.bfloat16()
        dist.all_reduce(narrow)
        p.grad.copy_(narrow / dist.get_world_size())


def drops_gradients(model):
    one_by_one(model)
    model.zero_grad()


def takes_gradients_as_arguments(model, grads):
    for grad in grads:
        dist.all_reduce(grad)


def rank_zero_only(model):
    if dist.get_rank() == 0:
        one_by_one(model)


WRONG = [
    (sums, "not_divided"),
    (mean_is_not_assigned, "not_divided"),
    (divides_by_four, "fixed_number"),
    (divides_by_two, "fixed_number"),
    (divides_by_the_others, "divided_by_others"),
    (divides_before_and_after, "divided_twice"),
    (only_divides, "own_divided"),
    (does_nothing, "still_own"),
    (averages_a_copy, "still_own"),
    (averages_parameters, "averages_parameters"),
    (takes_a_step_as_well, "parameters_changed"),
    (first_parameter_only, "some_left"),
    (weights_only, "some_left"),
    (reduces_to_rank_zero, "rank_zero_only"),
    (only_rank_zero_divides, "rank_zero_only"),
    (broadcasts_rank_zeros, "rank_zeros_gradient"),
    (forgets_the_remainder, "remainder"),
    (skips_none, "no_gradient"),
    (takes_none_for_a_tensor, "no_gradient"),
    (zeros_that_are_not_kept, "no_gradient"),
    (counts_those_that_have_one, "counts_those_present"),
    (frozen_as_well, "frozen"),
    (clears_frozen, "frozen"),
    (by_size, "order"),
    (in_the_order_of_a_set, "order"),
    (in_half_precision, "dtype_lost"),
    (drops_gradients, "gradient_lost"),
    (takes_gradients_as_arguments, "wrong_signature"),
    (rank_zero_only, ("returned_early", "skipped")),
    *lab02_average_more.WRONG,
]
