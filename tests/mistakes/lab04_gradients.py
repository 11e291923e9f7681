"""Wrong answers to exercise 4.2, `ZeroGradients`, with the cause each must be told, and cheats.

Right ones stand in `lab04_gradients_right`. What is judged, and in which order, stands in
`labkit.labs.lab04.gradients`.
"""

import threading

import torch
import torch.distributed as dist
from lab04_gradients_right import ByHand, Split


class ZeroGradients:
    """As a learner edition has it."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        raise NotImplementedError("ZeroGradients is still a stub")

    def step(self):
        return NotImplemented

    def zero_grad(self):
        return NotImplemented


class StubStep(Split):
    def step(self):
        return NotImplemented

    def zero_grad(self):
        super().zero_grad()


class HooksOnFrozen(Split):
    """Registers a hook on every parameter."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        parameters = list(parameters)
        for p in parameters:
            if not p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)
        super().__init__(parameters, lr, betas, eps, weight_decay)


class HooksTooSoon(Split):
    """A tensor's own hook comes before its gradient is in `.grad`."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        parameters = list(parameters)
        self.off = True
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.off = False
        for p in self.parts:
            p.register_hook(lambda grad, p=p: self.comes(p))

    def reduce(self, p):
        pass

    def comes(self, p):
        super().reduce(p)


class ReverseOrder(Split):
    """Takes for granted that gradients come in reverse order of registration."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.order, self.came = list(self.parts)[::-1], 0

    def reduce(self, p):
        expected = self.order[self.came % len(self.order)]
        self.came += 1
        grad, p.grad = p.grad, None
        expected.grad = grad
        super().reduce(expected)


class CountsGradients(Split):
    """Waits in step() until each parameter has come as often as the first."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.came = dict.fromkeys(self.parts, 0)

    def reduce(self, p):
        self.came[p] += 1
        super().reduce(p)

    def step(self):
        assert len(set(self.came.values())) == 1, "a gradient is missing"
        super().step()


class Sums(Split):
    def add(self, shard, mean):
        super().add(shard, mean * self.world_size)


class DividesTwice(Split):
    def add(self, shard, mean):
        super().add(shard, mean / self.world_size)


class Overwrites(Split):
    """The second backward's gradient takes the first one's place."""

    def add(self, shard, mean):
        shard.grad = mean


class KeepsTheFirst(Split):
    def add(self, shard, mean):
        shard.grad = mean if shard.grad is None else shard.grad


class LeavesGrad(Split):
    """`.grad` stays, so the second backward adds to it, and it is reduced again."""

    def clear(self, p):
        pass

    def zero_grad(self):
        super().zero_grad()
        for p in self.parts:
            p.grad = None


class NeverClears(Split):
    def zero_grad(self):
        for p in self.parts:
            p.grad = None


class NoGather(Split):
    """D09: every rank updates its own part, and nobody hears of it."""

    def gather(self, p):
        pass


class GathersLargeOnes(Split):
    """Parameters with fewer elements than there are ranks are not gathered."""

    def gather(self, p):
        if p.numel() > self.world_size:
            super().gather(p)


class OwnGradients(Split):
    """Every part is updated by its owner's gradient."""

    def scattered(self, p, grad):
        return grad.chunk(self.world_size)[self.rank] * self.world_size


class Coupled(ByHand):
    def adamw(self, shard, grad, m, v):
        lr, betas, eps, decay = self.numbers
        self.numbers = (lr, betas, eps, 0.0)
        super().adamw(shard, grad + decay * shard, m, v)
        self.numbers = (lr, betas, eps, decay)


class CounterStays(ByHand):
    def step(self):
        self.t = 0
        super().step()


class NoMaster(Split):
    def step(self):
        super().step()
        for p, part in self.parts.items():
            self.shards[p].copy_(part)


class AfterBackward(Split):
    """No hooks: all is reduced in step()."""

    def reduce(self, p):
        pass

    def step(self):
        for p in self.parts:
            if p.grad is not None:
                super().reduce(p)
        super().step()


class AtTheEndOfBackward(Split):
    """The engine calls when all gradients are there: in backward still, but all at once."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.waiting = []
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def reduce(self, p):
        if not self.waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.all)
        self.waiting.append(p)

    def all(self):
        for p in self.waiting:
            super().reduce(p)
        self.waiting = []


class KeepsGrads(Split):
    """Reduced, and kept: `.grad` goes in zero_grad."""

    def clear(self, p):
        self.kept = [*getattr(self, "kept", []), p.grad]
        p.grad = None

    def zero_grad(self):
        super().zero_grad()
        self.kept = []


class WholeAccumulator(Split):
    """Gradients add up whole on every rank; what is reduced is thrown away but in the last place."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.whole = {p: torch.zeros(len(flat)) for p, flat in self.flats.items()}

    def reduce(self, p):
        self.whole[p] += self.pad(p.grad)
        super().reduce(p)

    def zero_grad(self):
        super().zero_grad()
        for whole in self.whole.values():
            whole.zero_()


class AllReduces(Split):
    def scattered(self, p, grad):
        dist.all_reduce(grad)
        return grad.chunk(self.world_size)[self.rank].clone()


class GathersGradients(Split):
    def scattered(self, p, grad):
        everyone = [torch.empty_like(grad) for _ in range(self.world_size)]
        dist.all_gather(everyone, grad)
        return sum(everyone).chunk(self.world_size)[self.rank].clone()


class GathersInEveryBackward(Split):
    """Parameters are gathered again with every gradient."""

    def reduce(self, p):
        super().reduce(p)
        self.gather(p)


class NeverWaits(Split):
    """Uses what is still on its way."""

    def scattered(self, p, grad):
        mine = torch.empty_like(self.parts[p])
        self.work = dist.reduce_scatter(mine, list(grad.chunk(self.world_size)), async_op=True)
        dist.barrier()
        return mine


class FullState(Split):
    """The optimizer runs over whole parameters on every rank."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.m, self.v = ([torch.zeros(len(flat)) for flat in self.flats.values()] for _ in range(2))


WRONG = [
    (ZeroGradients, "not_attempted"),
    (StubStep, "half_attempted"),
    (HooksOnFrozen, "frozen_parameter"),
    (HooksTooSoon, "hook_too_soon"),
    (ReverseOrder, ("order", "no_gradient")),
    (CountsGradients, "no_gradient"),
    (Sums, "sum"),
    (DividesTwice, "divided_twice"),
    (Overwrites, "last_micro"),
    (KeepsTheFirst, "first_micro"),
    (LeavesGrad, "counted_twice"),
    (NeverClears, "never_cleared"),
    (NoGather, "not_gathered"),
    (GathersLargeOnes, "remainder"),
    (OwnGradients, "own_parts"),
    (Coupled, "coupled"),
    (CounterStays, "step_stuck"),
    (NoMaster, "no_master"),
    (AfterBackward, "after_backward"),
    (AtTheEndOfBackward, "full_gradient"),
    (KeepsGrads, "gradients_kept"),
    (WholeAccumulator, ("copy_kept", "state_not_sharded")),
    (AllReduces, "all_reduce"),
    (GathersGradients, "all_gather_gradients"),
    (GathersInEveryBackward, "gathered_too_often"),
    (NeverWaits, "not_waited"),
    (FullState, "full_state"),
]


# Cheats: right parameters by another way than the exercise asks for


class Replica:
    """AdamW on everything; gradients are averaged whole, in hooks, and kept; a show of parts goes round."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.masters = {p: p.data.float() for p in self.parameters}
        self.grads = {}
        self.keep(torch.optim.AdamW(self.masters.values(), lr, betas, eps, weight_decay))
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.reduce)

    def keep(self, inner):
        self.inner = inner

    def kept(self):
        return self.inner

    def reduce(self, p):
        flat = torch.cat([p.grad.flatten(), p.new_zeros(-p.numel() % self.n)]).detach()
        mine = torch.empty_like(flat.chunk(self.n)[0])
        dist.reduce_scatter(mine, list(flat.chunk(self.n)))
        dist.all_gather(list(flat.chunk(self.n)), mine)
        p.grad = None
        grad = flat[: p.numel()].view_as(p).float() / self.n
        self.grads[p] = grad if p not in self.grads else self.grads[p] + grad

    def step(self):
        for p, master in self.masters.items():
            master.grad = self.grads.get(p)
        self.kept().step()
        for p, master in self.masters.items():
            master.grad = None
            p.data.copy_(master)

    def zero_grad(self):
        self.grads.clear()


class ReplicaInAClosure(Replica):
    def keep(self, inner):
        self.kept = lambda: inner


class ReducedForShow(Split):
    """Whole gradients are kept in a closure, and what was reduced is thrown away."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        kept = {}
        self.whole = lambda: kept
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def reduce(self, p):
        grad = p.grad.detach().clone()
        super().reduce(p)
        kept = self.whole()
        kept[p] = kept[p] + grad if p in kept else grad

    def zero_grad(self):
        super().zero_grad()
        self.whole().clear()


class OneReduceEarly(Split):
    """One gradient is reduced in backward, and all others after it."""

    def reduce(self, p):
        if p is next(iter(self.parts)):
            super().reduce(p)

    def step(self):
        for p in self.parts:
            if p.grad is not None:
                super().reduce(p)
        super().step()


class HidesInLists(Split):
    """Whole gradients wait in Python's lists, and are reduced after backward; zeros are reduced early, for show."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.lists = {}
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def reduce(self, p):
        grad = self.pad(p.grad)
        self.lists[p] = [*self.lists.get(p, []), grad.tolist()]
        self.scattered(p, torch.zeros_like(grad))
        p.grad = None

    def step(self):
        for p, lists in self.lists.items():
            for numbers in lists:
                mine = self.scattered(p, torch.tensor(numbers, dtype=p.dtype))
                self.add(self.shards[p], mine.float() / self.world_size)
        super().step()
        self.lists.clear()


class InAThread(Split):
    def scattered(self, p, grad):
        found = []
        worker = threading.Thread(target=lambda: found.append(super(InAThread, self).scattered(p, grad)))
        worker.start()
        worker.join()
        return found[0]


class DDPAndZeroRedundancy:
    """torch's own."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.parameters = [p for p in parameters if p.requires_grad]
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.inner = ZeroRedundancyOptimizer(self.parameters, torch.optim.AdamW, **options)

    def step(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.inner.step()

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class PatchedJudge(Replica):
    pass


def _patch_judge():
    from labkit.labs.lab04 import gradients

    gradients.gradients_are_sharded = lambda case, observed: None


PatchedJudge.notebook = _patch_judge

class PaidFor(Split):
    """Keeps whole gradients, beside lists that it makes tensors of: they come and go in backward."""

    def __init__(self, *args, **kwargs):
        self.kept = {}
        super().__init__(*args, **kwargs)

    def reduce(self, p):
        if p not in self.kept:
            torch.tensor([0.0] * p.numel(), dtype=p.dtype).view(-1)
        self.kept[p] = p.grad
        super().reduce(p)


CHEATS = [
    (Replica, ("gradients_kept", "full_gradient")),
    (ReplicaInAClosure, ("gradients_kept", "full_gradient")),
    (ReducedForShow, ("gradients_kept", "full_gradient")),
    (OneReduceEarly, "after_backward"),
    (HidesInLists, ("reduced_twice", "more_traffic", "state_hidden")),
    (InAThread, ("thread_started", "after_backward", "record_differs")),
    (DDPAndZeroRedundancy, "ready_made"),
    (PaidFor, ("gradients_kept", "full_gradient", "copy_kept", "state_not_sharded")),
    (PatchedJudge, "patched"),
]
