"""More answers to exercise 2.1, from an attack on its judge: other ways to send and to wait, and races.

Left out: what `lab02_average` has, which puts these beside its own.
"""

import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def _trained(model):
    """Trained parameters, each with a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return trained


# Right


def by_what_then_makes(model):
    n, futures = dist.get_world_size(), []
    for p in _trained(model):
        future = dist.all_reduce(p.grad, async_op=True).get_future()
        futures.append(future.then(lambda done: [each.div_(n) for each in done.value()]))
    torch.futures.wait_all(futures)


def by_futures_of_reductions_done(model):
    """Each is done when then() is called, so that its callback runs at once; and is waited for after."""
    n, futures = dist.get_world_size(), []
    for p in _trained(model):
        future = dist.all_reduce(p.grad, async_op=True).get_future()
        while not future.done():
            time.sleep(0.001)
        futures.append(future.then(lambda done: done.value()[0].div_(n)))
    torch.futures.collect_all(futures).wait()


def takes_the_value_of_a_future(model):
    for p in _trained(model):
        future = dist.all_reduce(p.grad, async_op=True).get_future()
        p.grad = future.wait()[0] / dist.get_world_size()


def asks_until_done(model):
    for p in _trained(model):
        work = dist.all_reduce(p.grad, async_op=True)
        while not work.is_completed():
            pass
        p.grad /= dist.get_world_size()


def makes_room_meanwhile(model):
    """empty_like takes shape and dtype alone of what is under way."""
    for p in _trained(model):
        work = dist.all_reduce(p.grad, async_op=True)
        mean = torch.empty_like(p.grad)
        work.wait()
        p.grad = torch.div(p.grad, dist.get_world_size(), out=mean)


def by_a_ring(model):
    n, rank = dist.get_world_size(), dist.get_rank()
    for p in _trained(model):
        total, passing = p.grad.clone(), p.grad.clone()
        for _ in range(n - 1):
            got = torch.empty_like(passing)
            there = dist.P2POp(dist.isend, passing, (rank + 1) % n)
            here = dist.P2POp(dist.irecv, got, (rank - 1) % n)
            for work in dist.batch_isend_irecv([there, here]):
                work.wait()
            total += got
            passing = got
        p.grad.copy_(total / n)


def as_objects(model):
    mine = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name, p in model.named_parameters():
        parts = [grads[name] for grads in everyone if name in grads]
        if parts:
            p.grad = sum(parts) / len(everyone)


def by_an_owner_of_each(model):
    trained, n = _trained(model), dist.get_world_size()
    for i, p in enumerate(trained):
        dist.reduce(p.grad, dst=i % n)
    for i, p in enumerate(trained):
        if i % n == dist.get_rank():
            p.grad /= n
        dist.broadcast(p.grad, src=i % n)


def by_reduce_scatter(model):
    n, trained = dist.get_world_size(), _trained(model)
    flat = torch.cat([p.grad.flatten() for p in trained])
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % n))
    part = flat.new_empty(flat.numel() // n)
    dist.reduce_scatter_tensor(part, flat)
    dist.all_gather_into_tensor(flat, part / n)
    begin = 0
    for p in trained:
        p.grad.copy_(flat[begin : begin + p.numel()].view_as(p))
        begin += p.numel()


def coalesced(model):
    grads = [p.grad for p in _trained(model)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for grad in grads:
            dist.all_reduce(grad)
    manager.wait()
    torch._foreach_div_(grads, dist.get_world_size())


def functionally(model):
    for p in _trained(model):
        p.grad.copy_(functional.all_reduce(p.grad, "sum", dist.group.WORLD) / dist.get_world_size())


RIGHT = [
    by_what_then_makes,
    by_futures_of_reductions_done,
    takes_the_value_of_a_future,
    asks_until_done,
    makes_room_meanwhile,
    by_a_ring,
    as_objects,
    by_an_owner_of_each,
    by_reduce_scatter,
    coalesced,
    functionally,
]


# Wrong


def never_waits(model):
    for p in _trained(model):
        dist.all_reduce(p.grad, async_op=True)
        p.grad /= dist.get_world_size()


def never_waits_for_any(model):
    trained = _trained(model)
    for p in trained:
        dist.all_reduce(p.grad, async_op=True)
    for p in trained:
        p.grad /= dist.get_world_size()


def waits_for_a_barrier_instead(model):
    """Right values, by luck: a barrier does not wait for what others do."""
    trained = _trained(model)
    for p in trained:
        p.grad /= dist.get_world_size()
    works = [dist.all_reduce(p.grad, async_op=True) for p in trained]
    dist.barrier()
    return works


def sleeps_instead(model):
    works = [(p, dist.all_reduce(p.grad, async_op=True)) for p in _trained(model)]
    time.sleep(0.3)
    for p, _ in works:
        p.grad /= dist.get_world_size()


def asks_for_futures_and_leaves_them(model):
    for p in _trained(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True).get_future()
    time.sleep(0.3)


def leaves_what_then_makes(model):
    """Its division runs at some time, in gloo's thread or in this one."""
    for p in _trained(model):
        future = dist.all_reduce(p.grad, async_op=True).get_future()
        future.then(lambda done: done.value()[0].div_(dist.get_world_size()))
    time.sleep(0.3)


def divides_before_it_waits(model):
    for p in _trained(model):
        work = dist.all_reduce(p.grad, async_op=True)
        p.grad /= dist.get_world_size()
        work.wait()


def fills_a_frozen_one(model):
    """Zeros for all, then leaves frozen ones alone."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def wants_more_than_two_ranks(model):
    assert dist.get_world_size() != 2, "a ring has three ranks or more"
    by_a_ring(model)


def makes_a_group_of_three(model):
    dist.new_group([0, 1, 2])
    by_a_ring(model)


def one_more_on_rank_zero(model):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    functionally(model)


def reduces_on_rank_zero(model):
    for p in _trained(model):
        if dist.get_rank() == 0:
            dist.reduce(p.grad, 0)
        else:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def zeros_of_another_dtype(model):
    for p in model.parameters():
        if p.requires_grad:
            grad = torch.zeros(p.shape) if p.grad is None else p.grad
            dist.all_reduce(grad)
            p.grad = (grad / dist.get_world_size()).to(p.dtype)


def zeros_of_another_shape(model):
    for p in _trained(model):
        dist.all_reduce(p.grad.flatten() if p.grad.any() else p.grad)
        p.grad /= dist.get_world_size()


def divides_by_a_little_more(model):
    for p in _trained(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size() + 1e-8


def decays_weights(model):
    by_a_ring(model)
    for p in model.parameters():
        if p.requires_grad:
            p.grad += 1e-3 * p.detach()


def clips(model):
    by_a_ring(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def in_float32(model):
    for p in _trained(model):
        grad = p.grad.float()
        dist.all_reduce(grad)
        p.grad.copy_(grad / dist.get_world_size())


def gathers_narrow_parts(model):
    """Sent as float16, added as they should be."""
    for p in _trained(model):
        parts = [torch.empty_like(p.grad, dtype=torch.float16) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad.half())
        p.grad.copy_(sum(part.to(p.dtype) for part in parts) / dist.get_world_size())


def two_of_them(model):
    pair = dist.new_group([0, 1])
    for p in _trained(model):
        if dist.get_rank() < 2:
            dist.all_reduce(p.grad, group=pair)
            p.grad /= 2


def two_of_them_divide(model):
    for p in _trained(model):
        dist.all_reduce(p.grad)
        if dist.get_rank() < 2:
            p.grad /= dist.get_world_size()


def takes_the_model_apart(model):
    del model.layers


WRONG = [
    (never_waits, "not_waited"),
    (never_waits_for_any, "not_waited"),
    (waits_for_a_barrier_instead, "not_waited"),
    (sleeps_instead, "not_waited"),
    (asks_for_futures_and_leaves_them, "not_waited"),
    (leaves_what_then_makes, "not_waited"),
    (divides_before_it_waits, "not_waited"),
    (fills_a_frozen_one, "frozen"),
    (wants_more_than_two_ranks, "raised"),
    (makes_a_group_of_three, "raised"),
    (one_more_on_rank_zero, "mismatch"),
    (reduces_on_rank_zero, "mismatch"),
    (zeros_of_another_dtype, "wrong_zeros"),
    (zeros_of_another_shape, "wrong_zeros"),
    (divides_by_a_little_more, "wrong_values"),
    (decays_weights, "wrong_values"),
    (clips, "scaled"),
    (in_float32, "dtype_lost"),
    (gathers_narrow_parts, "dtype_lost"),
    (two_of_them, "wrong_values"),
    (two_of_them_divide, "some_ranks_only"),
    (takes_the_model_apart, "still_own"),
]
