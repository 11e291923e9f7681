"""Wrong answers to exercise 4.3, `ZeroParameters`, with the cause each must be told.

Right ones stand in `lab04_parameters_right`, cheats in `lab04_parameters_cheats`. What is judged, and in which order,
stands in `labkit.labs.lab04.parameters`.
"""

import torch
import torch.distributed as dist
from lab04_parameters_right import Split


class ZeroParameters(torch.nn.Module):
    """As a learner edition has it."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__()
        raise NotImplementedError("ZeroParameters is still a stub")

    def forward(self, *args):
        return NotImplemented

    def step(self):
        return NotImplemented

    def zero_grad(self):
        return NotImplemented


class StubForward(Split):
    def forward(self, *args):
        return NotImplemented

    def zero_grad(self):
        super().zero_grad()


class ForgetsToReturn(Split):
    def forward(self, *args):
        self.module(*args)


class NoStep(torch.nn.Module):
    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class HooksOnFrozen(Split):
    """Registers a hook on every parameter."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        for p in module.parameters():
            if p not in self.shards:
                p.register_post_accumulate_grad_hook(self.reduce)


class NotAgainInBackward(Split):
    """Gathers in forward, and forgets backward."""

    def after_forward(self, owner, args, out):
        self.free(owner.parameters(recurse=False))


class Sums(Split):
    def add(self, shard, mean):
        super().add(shard, mean * self.world_size)


class OwnGradients(Split):
    def scattered(self, p, grad):
        return grad.chunk(self.world_size)[self.parts_rank()].clone() * self.world_size

    def parts_rank(self):
        return dist.get_rank()


class Overwrites(Split):
    def add(self, shard, mean):
        shard.grad = mean


class NeverClears(Split):
    def zero_grad(self):
        pass


class GathersOld(Split):
    """What is gathered are the parts of the begin, which no step reaches."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        self.parts = {p: part.clone() for p, part in self.parts.items()}

    def step(self):
        self.inner.step()
        self.free(self.parts)


class CutsTheRestOff(Split):
    """A part is Psi // N elements; what does not divide is as it was in the beginning, on every rank."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n = dist.get_world_size()
        self.rest = {p: p.detach().flatten()[p.numel() // n * n :].clone() for p in module.parameters()}
        super().__init__(module, lr, betas, eps, weight_decay)

    def __setattr__(self, name, value):
        if name == "rest":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def pad(self, tensor):
        return tensor.flatten()[: tensor.numel() // self.world_size * self.world_size]

    def fill(self, p, full):
        super().fill(p, torch.cat([full, self.rest[p]]))


class OtherOrder(Split):
    """Parts come back from the last rank to the first."""

    def gathered(self, p):
        return torch.cat(super().gathered(p).chunk(self.world_size)[::-1])


class NoDecay(Split):
    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, 0.0)


class Adam(Split):
    """Adam, whose weight decay goes into the gradient."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        self.inner = torch.optim.Adam(self.shards.values(), lr, betas, eps, weight_decay)


class NoMaster(Split):
    def step(self):
        super().step()
        for p, shard in self.shards.items():
            shard.copy_(self.parts[p])


class NeverFrees(Split):
    """Gathers each once it is needed, and keeps it."""

    def free(self, parameters):
        pass


class FreesInStep(Split):
    """Whole from their forward on until step()."""

    def after_forward(self, owner, args, out):
        pass

    def clear(self, p):
        p.grad = None


class FreesAfterBackward(Split):
    """Free between forward and backward, and whole from their backward on until step()."""

    def clear(self, p):
        p.grad = None


class GathersAllFirst(Split):
    """The whole model is gathered when forward begins."""

    def forward(self, *args):
        for owner in self.module.modules():
            super().gather(owner)
        return self.module(*args)

    def gather(self, owner, *_):
        if any(p.untyped_storage().nbytes() == 0 for p in owner.parameters(recurse=False)):
            super().gather(owner)


class GathersAllForBackward(Split):
    """The first module that backward needs brings them all."""

    def forward(self, *args):
        self.all_there = False
        return self.module(*args)

    def gather(self, owner, *_):
        if torch._C._current_graph_task_id() == -1:
            super().gather(owner)
        elif not self.all_there:
            self.all_there = True
            for each in self.module.modules():
                super().gather(each)


class PlaceholdersForAutograd(Split):
    """Another tensor takes the parameter's place, while autograd still holds the old one."""

    def fill(self, p, full):
        p.data = full[: p.numel()].view(p.shape).clone()

    def free(self, parameters):
        for p in parameters:
            p.data = p.data.new_zeros(1).expand(p.shape)


class KeepsGrads(Split):
    """`.grad` is whole until zero_grad()."""

    def clear(self, p):
        self.free([p])

    def reduce(self, p):
        fresh = p.grad if not hasattr(p, "seen") else p.grad - p.seen
        mine = self.scattered(p, self.pad(fresh))
        p.seen = p.grad.clone()
        self.clear(p)
        self.add(self.shards[p], mine.float() / self.world_size)

    def zero_grad(self):
        super().zero_grad()
        for p in self.shards:
            p.grad = None
            if hasattr(p, "seen"):
                del p.seen


class AfterBackward(Split):
    """Gradients are reduced in step()."""

    def reduce(self, p):
        self.free([p])

    def step(self):
        for p in self.shards:
            if p.grad is not None:
                super().reduce(p)
        super().step()


class AllReduces(Split):
    def scattered(self, p, grad):
        dist.all_reduce(grad)
        return grad.chunk(self.world_size)[dist.get_rank()].clone()


class GathersTwice(Split):
    """Each gather comes twice."""

    def gathered(self, p):
        super().gathered(p)
        return super().gathered(p)


class FullState(Split):
    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        self.state = [torch.zeros(2 * len(part) * self.world_size) for part in self.parts.values()]


class KeepsTheStart(Split):
    """The parameters that were given stay alive, beside the parts."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        start = [p.detach().clone() for p in module.parameters()]
        super().__init__(module, lr, betas, eps, weight_decay)
        self.start = start


class NeverWaits(Split):
    def scattered(self, p, grad):
        mine = torch.empty_like(self.parts[p])
        self.work = dist.reduce_scatter(mine, list(grad.chunk(self.world_size)), async_op=True)
        dist.barrier()
        return mine


class FrozenWhole(Split):
    """What does not train is not cut."""

    def gather(self, owner, *_):
        for p in owner.parameters(recurse=False):
            if p.requires_grad:
                self.fill(p, self.gathered(p))

    def free(self, parameters):
        super().free([p for p in parameters if p.requires_grad])


class FrozenStayWhole(Split):
    """Parts that do not train are gathered in backward, and nothing ends their use."""

    def step(self):
        self.inner.step()
        for p, shard in self.shards.items():
            self.parts[p].copy_(shard)


WRONG = [
    (ZeroParameters, "not_attempted"),
    (StubForward, "half_attempted"),
    (ForgetsToReturn, "forward_result"),
    (NoStep, "no_step"),
    (HooksOnFrozen, "frozen_parameter"),
    (NotAgainInBackward, ("not_gathered_again", "died", "sum")),
    (Sums, "sum"),
    (OwnGradients, "own_parts"),
    (Overwrites, "last_micro"),
    (NeverClears, "never_cleared"),
    (GathersOld, "nothing_updated"),
    (CutsTheRestOff, "remainder"),
    (OtherOrder, "wrong_output"),
    (NoDecay, "no_decay"),
    (Adam, "coupled"),
    (NoMaster, "no_master"),
    (NeverFrees, "parameters_kept"),
    (FreesInStep, "kept_after_forward"),
    (FreesAfterBackward, "kept_after_backward"),
    (GathersAllFirst, "gathered_at_once"),
    (GathersAllForBackward, "whole_in_backward"),
    (PlaceholdersForAutograd, "kept_after_forward"),
    (KeepsGrads, "gradients_kept"),
    (FrozenStayWhole, "frozen_kept"),
    (FrozenWhole, "frozen_kept"),
    (AfterBackward, "after_backward"),
    (AllReduces, "all_reduce"),
    (GathersTwice, "gathered_too_often"),
    (FullState, "full_state"),
    (KeepsTheStart, "parameters_kept"),
    (NeverWaits, "not_waited"),
]
