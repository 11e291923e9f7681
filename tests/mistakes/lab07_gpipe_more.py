"""More answers to exercise 7.2, `gpipe`: what torch says of them misleads, or they do more work, or less, than due.

The first ones stand in `lab07_gpipe`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def _received(shape, peer):
    x = torch.empty(shape)
    dist.recv(x, peer)
    return x


def _backward(stage, x, y, gradient):
    y.backward(gradient)
    return x.grad


def _leaf(x):
    return x.requires_grad_()


def _with(stage, inputs, targets, shape, *, first=lambda x: x, leaf=_leaf, receive=_received, backward=_backward):
    """All forwards, all backwards, with parts of one's own."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    kept, total = [], 0.0
    for x, target in zip(inputs, targets, strict=True):
        x = first(x) if rank == 0 else leaf(receive(shape, rank - 1))
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / m
            total += float(y.detach())
        kept.append((x, y))
    for x, y in kept:
        back = backward(stage, x, y, _received(shape, rank + 1) if rank < last else None)
        if rank > 0:
            dist.send(back, rank - 1)
    return total


def no_gradient_of_inputs(stage, inputs, targets, shape):
    """Nobody asks for the gradient of the first rank's inputs."""
    return _with(stage, inputs, targets, shape, first=lambda x: x.detach())


def one_buffer_and_clones(stage, inputs, targets, shape):
    buffer = torch.empty(shape)

    def receive(shape, peer):
        dist.recv(buffer, peer)
        return buffer.clone()

    return _with(stage, inputs, targets, shape, receive=receive)


def loss_for_all(stage, inputs, targets, shape):
    loss = torch.tensor(_with(stage, inputs, targets, shape))
    dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


def input_and_weights_apart(stage, inputs, targets, shape):
    """Two backwards through the stage for each microbatch."""

    def backward(stage, x, y, gradient):
        (back,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        y.backward(gradient, inputs=list(stage.parameters()))
        return back

    return _with(stage, inputs, targets, shape, backward=backward)


def weights_forgotten(stage, inputs, targets, shape):
    def backward(stage, x, y, gradient):
        return torch.autograd.grad(y, x, gradient)[0]

    return _with(stage, inputs, targets, shape, backward=backward)


def cleared_at_the_end(stage, inputs, targets, shape):
    loss = _with(stage, inputs, targets, shape)
    stage.zero_grad()
    return loss


def nothing_received(stage, inputs, targets, shape):
    """Every rank gives its stage its own inputs."""
    return [stage(x) for x in inputs]


def loss_on_every_rank(stage, inputs, targets, shape):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for x, target in zip(inputs, targets, strict=True):
        y = stage(x if rank == 0 else _received(shape, rank - 1).requires_grad_())
        if rank < last:
            dist.send(y.detach(), rank + 1)
        F.mse_loss(y, target).backward()


def detached_output_kept(stage, inputs, targets, shape):
    def cut(stage, x, y, gradient):
        return _backward(stage, x, y.detach(), gradient)

    return _with(stage, inputs, targets, shape, backward=cut)


def no_leaf(stage, inputs, targets, shape):
    return _with(stage, inputs, targets, shape, leaf=lambda x: x.requires_grad_() * 1)


def divided_on_every_rank(stage, inputs, targets, shape):
    def backward(stage, x, y, gradient):
        return _backward(stage, x, y, None if gradient is None else gradient / len(inputs))

    return _with(stage, inputs, targets, shape, backward=backward)


def divided_twice(stage, inputs, targets, shape):
    def backward(stage, x, y, gradient):
        return _backward(stage, x, y / len(inputs) if gradient is None else y, gradient)

    return _with(stage, inputs, targets, shape, backward=backward)


def one_buffer(stage, inputs, targets, shape):
    """What comes is received over what is kept."""
    buffer = torch.empty(shape)

    def receive(shape, peer):
        dist.recv(buffer, peer)
        return buffer.detach()

    return _with(stage, inputs, targets, shape, receive=receive)


def last_one_left_out(stage, inputs, targets, shape):
    return _with(stage, inputs[:-1], targets[:-1], shape)


def gradient_first(stage, inputs, targets, shape):
    """A rank waits for a gradient before it has sent an output: all receive."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for x in inputs:
        gradient = _received(shape, rank + 1) if rank < last else None
        y = stage(x if rank == 0 else _received(shape, rank - 1).requires_grad_())
        if rank < last:
            dist.send(y.detach(), rank + 1)
        y.backward(gradient)


def not_cut(stage, inputs, targets, shape):
    """The whole batch at once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    whole = (len(inputs) * shape[0], *shape[1:])
    x = torch.cat(inputs) if rank == 0 else _received(whole, rank - 1).requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)
        y.backward(_received(whole, rank + 1))
    else:
        y = F.mse_loss(y, torch.cat(targets))
        y.backward()
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return y.detach() if rank == last else None


def everything_to_everybody(stage, inputs, targets, shape):
    """In step with all others, by broadcasts to all ranks."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(inputs)
    kept, total = {}, 0.0

    def shared(step, own, sources, turn):
        """What the rank before sent this time, as (microbatch, tensor)."""
        found = None
        for source in sources:
            if 0 <= step - turn(source) < m:
                tensor = own.clone() if source == rank else torch.empty(shape)
                dist.broadcast(tensor, source)
                if turn(source) + 1 == turn(rank):
                    found = step - turn(source), tensor
        return found

    came = None
    for step in range(m + p - 1):
        i, y = step - rank, None
        if 0 <= i < m:
            x = inputs[i] if rank == 0 else came[1].requires_grad_()
            y = stage(x)
            kept[i] = x, y if rank < p - 1 else F.mse_loss(y, targets[i]) / m
            total += float(kept[i][1].detach()) if rank == p - 1 else 0.0
        came = shared(step, y.detach() if y is not None else None, range(p - 1), lambda each: each) or came
    came = None
    for step in range(m + p - 1):
        i, back = step - (p - 1 - rank), None
        if 0 <= i < m:
            x, y = kept[i]
            y.backward(came[1] if rank < p - 1 else None)
            back = x.grad
        came = shared(step, back, range(p - 1, 0, -1), lambda each: p - 1 - each) or came
    return total


WRONG = [
    (input_and_weights_apart, "backward_twice"),
    (weights_forgotten, "not_added"),
    (cleared_at_the_end, "not_added"),
    (nothing_received, "no_input"),
    (loss_on_every_rank, "no_target"),
    (detached_output_kept, "graph_cut"),
    (no_leaf, "no_leaf"),
    (divided_on_every_rank, "scaled"),
    (divided_twice, "scaled"),
    (one_buffer, "overwritten"),
    (last_one_left_out, "left_out"),
    (gradient_first, "deadlock"),
    (not_cut, "not_cut"),
]
RIGHT = [no_gradient_of_inputs, one_buffer_and_clones, loss_for_all]
CHEATS = [(everything_to_everybody, "bytes_extra")]
