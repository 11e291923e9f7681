"""More answers to exercise 7.3, of another build: one loop, into which each answer puts its own sends and receives."""

from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F


class Step:
    """A rank's step; what subclasses change are its warm-up, and how it sends, receives and goes backward."""

    def __init__(self, stage, inputs, targets, shape):
        self.stage, self.inputs, self.targets, self.shape = stage, inputs, targets, shape
        self.rank, self.ranks, self.m = dist.get_rank(), dist.get_world_size(), len(inputs)
        self.kept, self.going, self.loss = deque(), {}, 0.0

    def warm_up(self):
        return min(self.m, self.ranks - 1 - self.rank)

    def receive(self, kind, i):
        came = torch.empty(self.shape)
        dist.recv(came, self.rank - 1 if kind == "F" else self.rank + 1)
        return came

    def send(self, tensor, peer):
        if peer in self.going:
            self.going[peer].wait()
        self.going[peer] = dist.isend(tensor, peer)

    def differentiate(self, x, y, gradient):
        y.backward(gradient)
        return x.grad

    def forward(self, i):
        x = self.inputs[i] if self.rank == 0 else self.receive("F", i).requires_grad_()
        y = self.stage(x)
        if self.rank < self.ranks - 1:
            self.send(y.detach(), self.rank + 1)
        else:
            y = F.mse_loss(y, self.targets[i]) / self.m
            self.loss += y.item()
        self.kept.append((i, x, y))

    def backward(self):
        i, x, y = self.kept.popleft()
        gradient = self.differentiate(x, y, self.receive("B", i) if self.rank < self.ranks - 1 else None)
        if self.rank > 0:
            self.send(gradient, self.rank - 1)

    def end(self):
        for work in self.going.values():
            work.wait()

    def run(self):
        first = self.warm_up()
        for i in range(self.m + first):
            if i < first:
                self.forward(i)
            elif i < self.m:
                self.forward(i)
                self.backward()
            else:
                self.backward()
        self.end()
        return self.loss if self.rank == self.ranks - 1 else None


class ByHand(Step):
    def differentiate(self, x, y, gradient):
        weights = list(self.stage.parameters())
        of_x, *of_weights = torch.autograd.grad(y, [x, *weights], gradient)
        for weight, each in zip(weights, of_weights, strict=True):
            weight.grad = each if weight.grad is None else weight.grad + each
        return of_x


class EarlyReceives(Step):
    """The next input is asked for before the stage runs on this one."""

    asked = None

    def receive(self, kind, i):
        if kind == "B":
            return super().receive(kind, i)
        came, work = self.asked or self.ask()
        work.wait()
        self.asked = self.ask() if i + 1 < self.m else None
        return came

    def ask(self):
        came = torch.empty(self.shape)
        return came, dist.irecv(came, self.rank - 1)


class WithoutMin(Step):
    def warm_up(self):
        return self.ranks - 1 - self.rank


class RankForWarmUp(Step):
    """Counted from the wrong end."""

    def warm_up(self):
        return min(self.m, self.rank)


class OneSendBuffer(Step):
    """Copied into before the send before it is waited for."""

    def send(self, tensor, peer):
        buffer = self.buffers.setdefault(peer, torch.empty(self.shape))
        buffer.copy_(tensor)
        super().send(buffer, peer)

    def warm_up(self):
        self.buffers = {}
        return super().warm_up()


class KeptHandles(Step):
    """Each receive waited for at once, its handle kept in a list to the end."""

    def receive(self, kind, i):
        came = torch.empty(self.shape)
        self.handles.append(dist.irecv(came, self.rank - 1 if kind == "F" else self.rank + 1))
        self.handles[-1].wait()
        return came

    def warm_up(self):
        self.handles = []
        return super().warm_up()


class NeverWaitedReceives(Step):
    def receive(self, kind, i):
        if kind == "B":
            return super().receive(kind, i)
        came = torch.empty(self.shape)
        dist.irecv(came, self.rank - 1)
        return came


class AllGradientsAskedFor(Step):
    """An irecv for each gradient from the start."""

    def warm_up(self):
        buffers = [torch.empty(self.shape) for _ in range(self.m if self.rank < self.ranks - 1 else 0)]
        self.asked = [(buffer, dist.irecv(buffer, self.rank + 1)) for buffer in buffers]
        return super().warm_up()

    def receive(self, kind, i):
        if kind == "F":
            return super().receive(kind, i)
        came, work = self.asked.pop(0)
        work.wait()
        return came


def by_autograd_grad(stage, inputs, targets, shape):
    return ByHand(stage, inputs, targets, shape).run()


def early_receives(stage, inputs, targets, shape):
    return EarlyReceives(stage, inputs, targets, shape).run()


def without_min(stage, inputs, targets, shape):
    return WithoutMin(stage, inputs, targets, shape).run()


def rank_for_warm_up(stage, inputs, targets, shape):
    return RankForWarmUp(stage, inputs, targets, shape).run()


def one_send_buffer(stage, inputs, targets, shape):
    return OneSendBuffer(stage, inputs, targets, shape).run()


def handles_kept(stage, inputs, targets, shape):
    return KeptHandles(stage, inputs, targets, shape).run()


def receives_not_waited(stage, inputs, targets, shape):
    return NeverWaitedReceives(stage, inputs, targets, shape).run()


def all_gradients_asked_for(stage, inputs, targets, shape):
    return AllGradientsAskedFor(stage, inputs, targets, shape).run()


def blocking_by_turns(stage, inputs, targets, shape):
    """Of two neighbours the even one sends first; nothing but send and recv."""
    rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
    step, first = Step(stage, inputs, targets, shape), min(m, last - rank)

    def exchange(tensor, peer):
        came = torch.empty(shape)
        for call in (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send):
            call(tensor if call is dist.send else came, peer)
        return came

    given, sent = {"F": None, "B": None}, []
    step.receive = lambda kind, i: given[kind]
    step.send = lambda tensor, peer: sent.append(tensor)
    came = None
    for i in range(m + first):
        if i < m:
            if came is None and rank > 0:
                came = torch.empty(shape)
                dist.recv(came, rank - 1)
            given["F"], came = came, None
            step.forward(i)
            if i < first:
                dist.send(sent.pop(), rank + 1)
        if i >= first:
            if rank < last and i < m:
                given["B"] = exchange(sent.pop(), rank + 1)
            elif rank < last:
                given["B"] = torch.empty(shape)
                dist.recv(given["B"], rank + 1)
            step.backward()
            if rank > 0 and i + 1 < m:
                came = exchange(sent.pop(), rank - 1)
            elif rank > 0:
                dist.send(sent.pop(), rank - 1)
    return step.loss if rank == last else None


WRONG = [
    (without_min, "few_microbatches"),
    (rank_for_warm_up, "deadlock"),
    (one_send_buffer, "changed_under_way"),
    (handles_kept, "kept"),
    (receives_not_waited, "not_waited"),
    (all_gradients_asked_for, "kept"),
]
RIGHT = [by_autograd_grad, early_receives, blocking_by_turns]
