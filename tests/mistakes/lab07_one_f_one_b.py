"""Answers to exercise 7.3, `one_f_one_b`: wrong ones with the cause each must be told, right ones, cheats."""

import lab07_gpipe as gpipe_answers
import torch
import torch.distributed as dist
import torch.nn.functional as F


def _parts(stage, inputs, targets, shape):
    """(forward(i, x), backward(i, gradient), loss()) of a rank; x and gradient as they were received."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, losses = {}, []

    def forward(i, x=None):
        x = inputs[i] if rank == 0 else x.requires_grad_()
        y = stage(x)
        if rank == last:
            y = F.mse_loss(y, targets[i]) / len(inputs)
            losses.append(y.detach())
        kept[i] = x, y
        return y.detach()

    def backward(i, gradient=None):
        x, y = kept.pop(i)
        y.backward(gradient)
        return x.grad

    return forward, backward, lambda: sum(losses) if rank == last else None


def asynchronous(stage, inputs, targets, shape, warm_up=None, most=1):
    """isend, waited for before the next but `most` in the same direction."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)
    works = {rank - 1: [], rank + 1: []}

    def came(peer):
        buffer = torch.empty(shape)
        dist.recv(buffer, peer)
        return buffer

    def send(tensor, peer):
        if len(works[peer]) >= most:
            works[peer].pop(0).wait()
        works[peer].append(dist.isend(tensor, peer))

    def do_forward(i):
        y = forward(i, came(rank - 1) if rank > 0 else None)
        if rank < last:
            send(y, rank + 1)

    def do_backward(i):
        gradient = backward(i, came(rank + 1) if rank < last else None)
        if rank > 0:
            send(gradient, rank - 1)

    first = min(m, last - rank if warm_up is None else warm_up(rank, last, m))
    for i in range(first):
        do_forward(i)
    for i in range(first, m):
        do_forward(i)
        do_backward(i - first)
    for i in range(m - first, m):
        do_backward(i)
    for work in works[rank - 1] + works[rank + 1]:
        work.wait()
    return loss()


def two_under_way(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, most=2)


def as_many_as_ranks_under_way(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, most=dist.get_world_size())


def waited_at_the_end(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, most=len(inputs))


def no_gradient_of_inputs(stage, inputs, targets, shape):
    """Nobody asks for the gradient of the first rank's inputs."""
    return asynchronous(stage, [x if x is None else x.detach() for x in inputs], targets, shape)


def batched(stage, inputs, targets, shape, waits=True):
    """As Megatron does: the send of one and the receive of the other in one batch."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)

    def exchange(sent=None, to=None, source=None):
        ops, buffer = [], None
        if sent is not None and 0 <= to <= last:
            ops.append(dist.P2POp(dist.isend, sent, to))
        if source is not None and 0 <= source <= last:
            buffer = torch.empty(shape)
            ops.append(dist.P2POp(dist.irecv, buffer, source))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        return buffer

    first = min(m, last - rank)
    for i in range(first):
        exchange(forward(i, exchange(source=rank - 1)), rank + 1)
    x = exchange(source=rank - 1) if first < m else None
    for i in range(first, m):
        gradient = exchange(forward(i, x), rank + 1, source=rank + 1)
        back = backward(i - first, gradient)
        x = exchange(back, rank - 1, source=rank - 1 if i + 1 < m else None)
    for i in range(m - first, m):
        exchange(backward(i, exchange(source=rank + 1)), rank - 1)
    return loss()


def blocking(stage, inputs, targets, shape):
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)

    def came(peer):
        buffer = torch.empty(shape)
        dist.recv(buffer, peer)
        return buffer

    def do_forward(i):
        y = forward(i, came(rank - 1) if rank > 0 else None)
        if rank < last:
            dist.send(y, rank + 1)

    def do_backward(i):
        gradient = backward(i, came(rank + 1) if rank < last else None)
        if rank > 0:
            dist.send(gradient, rank - 1)

    first = min(m, last - rank)
    for i in range(first):
        do_forward(i)
    for i in range(first, m):
        do_forward(i)
        do_backward(i - first)
    for i in range(m - first, m):
        do_backward(i)
    return loss()


def one_more(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, lambda rank, last, m: last - rank + 1)


def twice_as_many(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, lambda rank, last, m: 2 * (last - rank))


def as_gpipe(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, lambda rank, last, m: m)


def no_warm_up(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, lambda rank, last, m: 0)


def one_too_few(stage, inputs, targets, shape):
    return asynchronous(stage, inputs, targets, shape, lambda rank, last, m: max(min(1, last - rank), last - rank - 1))


def last_in_first_out(stage, inputs, targets, shape):
    """Backwards take what was kept last."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)
    works, kept = [], []

    def do_forward(i):
        x = torch.empty(shape) if rank > 0 else None
        if rank > 0:
            dist.recv(x, rank - 1)
        y = forward(i, x)
        kept.append(i)
        if rank < last:
            works.append(dist.isend(y, rank + 1))

    def do_backward():
        gradient = torch.empty(shape) if rank < last else None
        if rank < last:
            dist.recv(gradient, rank + 1)
        back = backward(kept.pop(), gradient)
        if rank > 0:
            works.append(dist.isend(back, rank - 1))

    first = min(m, last - rank)
    for i in range(m):
        do_forward(i)
        if i >= first:
            do_backward()
    for _ in range(first):
        do_backward()
    for work in works:
        work.wait()
    return loss()


def not_divided(stage, inputs, targets, shape):
    found = asynchronous(stage, inputs, targets, shape)
    for weight in stage.parameters():
        weight.grad *= len(inputs)
    return found


def graphs_retained(stage, inputs, targets, shape):
    """The order is right, but all that was kept is kept to the end."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    kept, total, works, done = [], 0.0, [], 0
    first = min(m, last - rank)
    for kind in "F" * first + "FB" * (m - first) + "B" * first:
        came, peer = torch.empty(shape), rank - 1 if kind == "F" else rank + 1
        if 0 <= peer <= last:
            dist.recv(came, peer)
        if kind == "F":
            x = came.requires_grad_() if rank > 0 else inputs[len(kept)]
            y = stage(x)
            if rank < last:
                works.append(dist.isend(y.detach(), rank + 1))
            else:
                y = F.mse_loss(y, targets[len(kept)]) / m
                total += float(y.detach())
            kept.append((x, y))
        else:
            x, y = kept[done]
            done += 1
            y.backward(came if rank < last else None, retain_graph=True)
            if rank > 0:
                works.append(dist.isend(x.grad, rank - 1))
    for work in works:
        work.wait()
    return total


def copies(stage, inputs, targets, shape):
    """A copy of all that comes and of all that goes."""

    class Copying(torch.nn.Module):
        def forward(self, x):
            return stage(x if rank == 0 else x.clone()).clone()

        def parameters(self, recurse=True):
            return stage.parameters(recurse)

    rank = dist.get_rank()
    return asynchronous(Copying(), inputs, targets, shape)


def never_dropped(stage, inputs, targets, shape, given=None):
    """Inputs and outputs stay in a list to the end; backward frees the graphs. given: of each input, where it comes."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    kept, total, going, done = [], 0.0, {}, 0

    def send(tensor, peer):
        if peer in going:
            going[peer].wait()
        going[peer] = dist.isend(tensor, peer)

    first = min(m, last - rank)
    for kind in "F" * first + "FB" * (m - first) + "B" * first:
        peer = rank - 1 if kind == "F" else rank + 1
        came = given[len(kept)] if kind == "F" and given else torch.empty(shape)
        if 0 <= peer <= last:
            dist.recv(came, peer)
        if kind == "F":
            x = came.requires_grad_() if rank > 0 else inputs[len(kept)]
            y = stage(x)
            if rank < last:
                send(y.detach(), rank + 1)
            else:
                y = F.mse_loss(y, targets[len(kept)]) / m
                total += float(y.detach())
            kept.append((x, y))
        else:
            x, y = kept[done]
            kept[done] = kept[done] if given is None else None
            done += 1
            y.backward(came if rank < last else None)
            if rank > 0:
                send(x.grad, rank - 1)
    for work in going.values():
        work.wait()
    return total if rank == last else None


def buffers_for_all(stage, inputs, targets, shape):
    """A buffer for each microbatch from the start to the end."""
    return never_dropped(stage, inputs, targets, shape, [torch.empty(shape) for _ in inputs])


def no_cool_down(stage, inputs, targets, shape):
    """The backwards of the warm-up's microbatches never come."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)
    works, first = [], min(m, last - rank)
    for i in range(m):
        x = None
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
        y = forward(i, x)
        if rank < last:
            works.append(dist.isend(y, rank + 1))
        if i >= first:
            gradient = None
            if rank < last:
                gradient = torch.empty(shape)
                dist.recv(gradient, rank + 1)
            back = backward(i - first, gradient)
            if rank > 0:
                works.append(dist.isend(back, rank - 1))
    for work in works:
        work.wait()
    return loss()


def sends_not_waited(stage, inputs, targets, shape):
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    forward, backward, loss = _parts(stage, inputs, targets, shape)
    first = min(m, last - rank)
    for i in range(m + first):
        if i < m:
            x = None
            if rank > 0:
                x = torch.empty(shape)
                dist.recv(x, rank - 1)
            y = forward(i, x)
            if rank < last:
                dist.isend(y, rank + 1)
        if i >= first:
            gradient = None
            if rank < last:
                gradient = torch.empty(shape)
                dist.recv(gradient, rank + 1)
            back = backward(i - first, gradient)
            if rank > 0:
                dist.isend(back, rank - 1)
    return loss()


def slow_last_rank(stage, inputs, targets, shape):
    """The last rank sends every gradient one microbatch late."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    if rank < last:
        return asynchronous(stage, inputs, targets, shape)
    forward, backward, loss = _parts(stage, inputs, targets, shape)
    work, late = None, None
    for i in range(m):
        if i >= 2:
            work.wait() if work else None
            work, late = dist.isend(late, rank - 1), None
        buffer = torch.empty(shape)
        dist.recv(buffer, rank - 1)
        forward(i, buffer)
        if i == 1:
            work = dist.isend(late, rank - 1)
        late = backward(i)
    work.wait() if work else None
    dist.send(late, rank - 1)
    return loss()


# Cheats


def by_torch(stage, inputs, targets, shape):
    from torch.distributed import pipelining

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    made = pipelining.PipelineStage(stage, rank, last + 1, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(made, len(inputs), loss_fn=F.mse_loss)
    losses = []
    given = (torch.cat([x.detach() for x in inputs]).requires_grad_(),) if rank == 0 else ()
    schedule.step(*given, target=torch.cat(targets) if rank == last else None, losses=losses)
    return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else None


def whole_model_everywhere(stage, inputs, targets, shape):
    return gpipe_answers.whole_model_everywhere(stage, inputs, targets, shape)


def one_after_another(stage, inputs, targets, shape):
    return gpipe_answers.one_after_another(stage, inputs, targets, shape)


def as_gpipe_with_other_notes(stage, inputs, targets, shape):
    """GPipe, whose order is then written anew where the stage has noted it."""
    loss = as_gpipe(stage, inputs, targets, shape)
    m, first = len(inputs), min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())
    notes = [f"F{i}" for i in range(first)]
    for i in range(m):
        notes += ([f"F{first + i}"] if first + i < m else []) + [f"B{i}"]
    stage.notes[:] = notes
    return loss


WRONG = [
    (blocking, "deadlock"),
    (one_more, "in_flight"),
    (twice_as_many, "in_flight"),
    (as_gpipe, "in_flight"),
    (no_warm_up, "one_at_a_time"),
    (one_too_few, "idle"),
    (last_in_first_out, "mixed_up"),
    (not_divided, "not_divided"),
    (no_cool_down, ("unmatched", "returned_early")),
    (sends_not_waited, "not_waited"),
    (slow_last_rank, ("idle", "deadlock")),
    (graphs_retained, "kept"),
    (never_dropped, "kept"),
    (buffers_for_all, "kept"),
    (waited_at_the_end, "sent_kept"),
]
RIGHT = [asynchronous, two_under_way, as_many_as_ranks_under_way, batched, copies, no_gradient_of_inputs]
CHEATS = [
    (one_after_another, "one_at_a_time"),
    (whole_model_everywhere, "whole_model"),
    (by_torch, "ready_made"),
    (as_gpipe_with_other_notes, "notes_changed"),
]
