"""Answers to exercise 7.4, `sum_tied`: wrong ones with the cause each must be told, right ones, cheats."""

import torch
import torch.distributed as dist


def in_a_group(weight):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if weight is not None:
        dist.all_reduce(weight.grad, group=ends)


def exchanged(weight):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank not in (0, last):
        return
    came, other = torch.empty_like(weight), last - rank
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, weight.grad.clone(), other), dist.P2POp(dist.irecv, came, other)]
    )
    for work in works:
        work.wait()
    weight.grad += came


def in_a_group_of_their_own(weight):
    """Made by the two alone, as torch allows when told so."""
    if weight is not None:
        ends = dist.new_group([0, dist.get_world_size() - 1], use_local_synchronization=True)
        dist.all_reduce(weight.grad, group=ends)


def new_group_alone(weight):
    """The ranks between return before they have called new_group."""
    if weight is None:
        return
    ends = dist.new_group([0, dist.get_world_size() - 1])
    dist.all_reduce(weight.grad, group=ends)


def averaged(weight):
    in_a_group(weight)
    if weight is not None:
        weight.grad /= 2


def averaged_over_all(weight):
    in_a_group(weight)
    if weight is not None:
        weight.grad /= dist.get_world_size()


def nothing(weight):
    """Each end steps on its own."""


def to_the_first(weight):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        dist.send(weight.grad, 0)
    elif rank == 0:
        came = torch.empty_like(weight)
        dist.recv(came, last)
        weight.grad += came


def overwritten(weight):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if weight is not None:
        dist.broadcast(weight.grad, 0, group=ends)


def swapped(weight):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if weight is None:
        return
    mine, other = weight.grad.clone(), last - rank
    work = dist.isend(mine, other)
    dist.recv(weight.grad, other)
    work.wait()


def doubled(weight):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if weight is not None:
        whole = weight.grad.clone()
        dist.all_reduce(whole, group=ends)
        weight.grad += whole


def weights_summed(weight):
    ends = dist.new_group([0, dist.get_world_size() - 1])
    if weight is not None:
        with torch.no_grad():
            dist.all_reduce(weight, group=ends)


def by_all(weight):
    """Zeros from the ranks between the ends."""
    shape = [list(weight.shape) if weight is not None else None]
    dist.broadcast_object_list(shape, 0)
    gradient = torch.zeros(shape[0]) if weight is None else weight.grad
    dist.all_reduce(gradient)


def without_looking(weight):
    dist.all_reduce(weight.grad)


def through_the_middle(weight):
    """Handed on from rank to rank, as activations are."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    size = [weight.shape if weight is not None else None]
    dist.broadcast_object_list(size, 0)
    came = torch.zeros(size[0])
    if rank > 0:
        dist.recv(came, rank - 1)
    whole = came + weight.grad if weight is not None else came
    if rank < last:
        dist.send(whole, rank + 1)
        dist.recv(whole, rank + 1)
    if rank > 0:
        dist.send(whole, rank - 1)
    if weight is not None:
        weight.grad = whole


def gathered_everywhere(weight):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, None if weight is None else weight.grad)
    if weight is not None:
        weight.grad = parts[0] + parts[-1]


def added_while_sent(weight, waits=True, copy=False):
    """The gradient is added to while it is under way."""
    if weight is None:
        return
    other = dist.get_world_size() - 1 - dist.get_rank()
    came = torch.empty_like(weight.grad)
    work = dist.isend(weight.grad.clone() if copy else weight.grad, other)
    dist.recv(came, other)
    weight.grad += came
    if waits:
        work.wait()


def a_copy_sent(weight):
    added_while_sent(weight, copy=True)


def a_copy_not_waited(weight):
    added_while_sent(weight, waits=False, copy=True)


def _added_from(weight, sent, waits=True):
    """The gradient of an end with what the other one sent added, in a new tensor."""
    other = dist.get_world_size() - 1 - dist.get_rank()
    came = torch.zeros_like(weight)
    arrived, gone = dist.irecv(came, other), dist.isend(sent, other)
    gone.wait()
    if waits:
        arrived.wait()
    return weight.grad + came


def returned_alone(weight):
    """The sum is worked out, and `.grad` does not hear of it."""
    return None if weight is None else _added_from(weight, weight.grad)


def weights_sent(weight):
    if weight is not None:
        weight.grad = _added_from(weight, weight.detach())


def used_too_soon(weight):
    """Added before wait() of its irecv."""
    if weight is not None:
        weight.grad = _added_from(weight, weight.grad, waits=False)


def sum_sent_back(weight):
    """The first adds, and sends the sum back."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        dist.send(weight.grad, 0, tag=1)
        dist.recv(weight.grad, 0, tag=2)
    elif rank == 0:
        came = torch.empty(weight.shape)
        dist.recv(came, last, tag=1)
        weight.grad = weight.grad + came
        dist.send(weight.grad, last, tag=2)


def reduced_and_broadcast(weight):
    last = dist.get_world_size() - 1
    ends = dist.new_group([0, last])
    if dist.get_rank() in (0, last):
        dist.reduce(weight.grad, 0, group=ends)
        dist.broadcast(weight.grad, 0, group=ends)
        dist.destroy_process_group(ends)


def by_labkit(weight):
    from labkit.model.stages import sum_shared

    if weight is not None:
        last = dist.get_world_size() - 1
        sum_shared({"w": weight}, {"w": (0, last)})


WRONG = [
    (averaged, "averaged"),
    (averaged_over_all, ("averaged", "wrong_sum")),
    (nothing, "not_summed"),
    (to_the_first, "one_sided"),
    (overwritten, "overwritten"),
    (swapped, "swapped"),
    (doubled, "wrong_sum"),
    (weights_summed, "weight_changed"),
    (by_all, "middle_ranks"),
    (without_looking, "middle_ranks"),
    (through_the_middle, "middle_ranks"),
    (added_while_sent, "changed_under_way"),
    (a_copy_not_waited, "not_waited"),
    (new_group_alone, "new_group_alone"),
    (returned_alone, "not_summed"),
    (weights_sent, "wrong_sum"),
    (used_too_soon, "not_waited"),
]
RIGHT = [in_a_group, in_a_group_of_their_own, exchanged, a_copy_sent, sum_sent_back, reduced_and_broadcast]
CHEATS = [
    (gathered_everywhere, "middle_ranks"),
    (by_labkit, "ready_made"),
]
