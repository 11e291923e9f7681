"""Answers to exercise 7.2, `gpipe`: wrong ones with the cause each must be told, right ones, cheats."""

import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F


def _neighbours():
    return dist.get_rank(), dist.get_world_size() - 1


def blocking(stage, inputs, targets, shape):
    rank, last = _neighbours()
    kept, losses = [], []
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            losses.append(y.detach())
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return sum(losses) if rank == last else None


def ahead(stage, inputs, targets, shape):
    """Receives posted at once, sends waited for at the end, backwards last in first out, torch.autograd.grad."""
    rank, last = _neighbours()
    m, works = len(inputs), []
    if rank > 0:
        inputs = [torch.empty(shape) for _ in range(m)]
        coming = [dist.irecv(x, rank - 1) for x in inputs]
    gradients = [torch.empty(shape) for _ in range(m)] if rank < last else [None] * m
    outputs, loss = [], 0.0
    for i in range(m):
        if rank > 0:
            coming[i].wait()
            inputs[i].requires_grad_()
        y = stage(inputs[i])
        if rank == last:
            y = F.mse_loss(y, targets[i])
            loss += float(y.detach()) / m
        else:
            works.append(dist.isend(y.detach(), rank + 1))
        outputs.append(y)
    order = list(reversed(range(m)))
    if rank < last:
        back = {i: dist.irecv(gradients[i], rank + 1) for i in order}
    weights = list(stage.parameters())
    for i in order:
        start = torch.tensor(1 / m) if rank == last else gradients[i]
        if rank < last:
            back[i].wait()
        found = torch.autograd.grad(outputs[i], [inputs[i], *weights], start)
        for weight, gradient in zip(weights, found[1:], strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if rank > 0:
            works.append(dist.isend(found[0], rank - 1))
    for work in works:
        work.wait()
    return loss if rank == last else None


def with_changes(stage, inputs, targets, shape, *, mean=True, order=None, handed=lambda x, y: x.grad, returned=None):
    """`blocking`, of which parts can be done wrongly."""
    rank, last = _neighbours()
    m, kept, losses = len(inputs), [], []
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        y.retain_grad()
        out = y
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            out = F.mse_loss(y, target) / (m if mean else 1)
            losses.append(out.detach())
        kept.append((x, y, out))
    for i in order(rank, last, m) if order else range(m):
        x, y, out = kept[i]
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        out.backward(gradient)
        if rank > 0:
            dist.send(handed(x, y), rank - 1)
    if returned is not None:
        return returned(losses, m)
    return sum(losses) / (1 if mean else m) if rank == last else None


def not_divided(stage, inputs, targets, shape):
    return with_changes(stage, inputs, targets, shape, mean=False)


def order_differs(stage, inputs, targets, shape):
    def order(rank, last, m):
        return range(m) if rank == last else reversed(range(m))

    return with_changes(stage, inputs, targets, shape, order=order)


def gradient_of_the_output(stage, inputs, targets, shape):
    return with_changes(stage, inputs, targets, shape, handed=lambda x, y: y.grad)


def sum_returned(stage, inputs, targets, shape):
    return with_changes(stage, inputs, targets, shape, returned=lambda losses, m: sum(losses) * m if losses else None)


def nothing_returned(stage, inputs, targets, shape):
    with_changes(stage, inputs, targets, shape)


def no_requires_grad(stage, inputs, targets, shape):
    rank, last = _neighbours()
    kept, total = [], 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def forwards_alone(stage, inputs, targets, shape):
    rank, last = _neighbours()
    total = 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            total += float(F.mse_loss(y, target).detach()) / len(inputs)
    return total


def nothing_sent_back(stage, inputs, targets, shape):
    rank, last = _neighbours()
    losses = []
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            losses.append(F.mse_loss(y, target) / len(inputs))
    if rank == last:
        sum(losses).backward()
        return sum(losses).detach()


def one_microbatch(stage, inputs, targets, shape):
    """Gradients are cleared before each backward."""
    rank, last = _neighbours()
    kept, total = [], 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        stage.zero_grad()
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def one_after_another(stage, inputs, targets, shape):
    rank, last = _neighbours()
    total = 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y, gradient = stage(x), None
        if rank < last:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def early_backwards(stage, inputs, targets, shape):
    """The last rank begins its backwards at once, and keeps the gradients until all forwards are over."""
    rank, last = _neighbours()
    if rank < last:
        return blocking(stage, inputs, targets, shape)
    total, back = 0.0, []
    for target in targets:
        x = torch.empty(shape)
        dist.recv(x, rank - 1)
        x.requires_grad_()
        loss = F.mse_loss(stage(x), target) / len(targets)
        total += float(loss.detach())
        loss.backward()
        back.append(x.grad)
    for gradient in back:
        dist.send(gradient, rank - 1)
    return total


def forward_again(stage, inputs, targets, shape):
    """Keeps inputs alone, and runs forward anew before backward."""
    rank, last = _neighbours()
    kept, total = [], 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        with torch.no_grad():
            y = stage(x)
        if rank < last:
            dist.send(y, rank + 1)
        kept.append((x, target))
    for x, target in kept:
        y, gradient = stage(x), None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def sends_not_waited(stage, inputs, targets, shape):
    rank, last = _neighbours()
    kept, total = [], 0.0
    for x, target in zip(inputs, targets, strict=True):
        if rank > 0:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            dist.isend(y.detach(), rank + 1)
        else:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        kept.append((x, y))
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.isend(x.grad, rank - 1)
    return total


def all_handed_on_late(stage, inputs, targets, shape):
    """Every rank does all its forwards before it sends the first output."""
    rank, last = _neighbours()
    kept, total = [], 0.0
    if rank > 0:
        inputs = [torch.empty(shape) for _ in inputs]
        for x in inputs:
            dist.recv(x, rank - 1)
            x.requires_grad_()
    for x, target in zip(inputs, targets, strict=True):
        y = stage(x)
        if rank == last:
            y = F.mse_loss(y, target) / len(inputs)
            total += float(y.detach())
        kept.append((x, y))
    if rank < last:
        for _, y in kept:
            dist.send(y.detach(), rank + 1)
    for x, y in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


# Cheats


def whole_model_everywhere(stage, inputs, targets, shape):
    """Every rank gathers all weights and all data, and trains the whole model."""
    own = [weight.detach().clone() for weight in stage.parameters()]
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, (own, inputs, targets))
    models = [[weight.requires_grad_() for weight in weights] for weights, _, _ in everything]
    total = 0.0
    for x, target in zip(everything[0][1], everything[-1][2], strict=True):
        for weights in models:
            for weight in weights:
                x = torch.tanh(F.linear(x, weight))
        loss = F.mse_loss(x, target) / len(inputs)
        loss.backward()
        total += float(loss.detach())
    for weight, trained in zip(stage.parameters(), models[dist.get_rank()], strict=True):
        weight.grad = trained.grad
    return total


def gradients_from_the_last(stage, inputs, targets, shape):
    """The last rank does all the work and sends the others their gradients."""
    rank, last = _neighbours()
    own = [weight.detach().clone() for weight in stage.parameters()]
    everything = [None] * (last + 1)
    dist.all_gather_object(everything, (own, inputs, targets))
    found, total = [None], 0.0
    if rank == last:
        models = [[weight.requires_grad_() for weight in weights] for weights, _, _ in everything]
        for x, target in zip(everything[0][1], targets, strict=True):
            for weights in models:
                for weight in weights:
                    x = torch.tanh(F.linear(x, weight))
            loss = F.mse_loss(x, target) / len(inputs)
            loss.backward()
            total += float(loss.detach())
        found = [[[weight.grad for weight in weights] for weights in models]]
    dist.broadcast_object_list(found, last)
    for weight, gradient in zip(stage.parameters(), found[0][rank], strict=True):
        weight.grad = gradient
    return total


def by_torch(stage, inputs, targets, shape):
    from torch.distributed import pipelining

    return _piped(pipelining, stage, inputs, targets)


def by_torch_unnamed(stage, inputs, targets, shape):
    """Stages of torch's find out shapes first, by a forward more and by messages."""
    return _piped(importlib.import_module("torch.distributed." + "pipelining"), stage, inputs, targets)


def _piped(pipelining, stage, inputs, targets):
    rank, last = _neighbours()
    made = pipelining.PipelineStage(stage, rank, last + 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(made, len(inputs), loss_fn=F.mse_loss)
    losses = []
    given = (torch.cat([x.detach() for x in inputs]).requires_grad_(),) if rank == 0 else ()
    schedule.step(*given, target=torch.cat(targets) if rank == last else None, losses=losses)
    return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else None


def by_labkit(stage, inputs, targets, shape):
    from labkit.model.pipeline import run
    from labkit.schedule.classic import gpipe

    rank, last = _neighbours()
    pairs = list(zip(inputs, targets, strict=True))
    return run(gpipe(last + 1, len(inputs)), {rank: stage}, pairs, F.mse_loss, shape)


WRONG = [
    (not_divided, "not_divided"),
    (order_differs, "mixed_up"),
    (gradient_of_the_output, "mixed_up"),
    (sum_returned, "wrong_loss"),
    (nothing_returned, "wrong_loss"),
    (no_requires_grad, "no_requires_grad"),
    (forwards_alone, "no_backward"),
    (nothing_sent_back, "not_handed_on"),
    (one_microbatch, "one_microbatch"),
    (one_after_another, "one_at_a_time"),
    (early_backwards, "not_gpipe"),
    (forward_again, "recomputed"),
    (sends_not_waited, "not_waited"),
    (all_handed_on_late, "idle"),
]
RIGHT = [blocking, ahead]
CHEATS = [
    (whole_model_everywhere, "whole_model"),
    (gradients_from_the_last, ("whole_model", "not_own_work")),
    (by_torch, "ready_made"),
    (by_torch_unnamed, ("recomputed", "bytes_extra")),
    (by_labkit, "ready_made"),
]
