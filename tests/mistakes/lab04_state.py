"""Wrong answers to exercise 4.1, `ZeroOptimizer`, with the cause each must be told.

Right ones stand in `lab04_state_right`, cheats in `lab04_state_cheats`. What is judged, and in which order, stands in
`labkit.labs.lab04.state`.
"""

import torch
import torch.distributed as dist
from lab04_state_right import ByHand, Split


class ZeroOptimizer:
    """As a learner edition has it."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        raise NotImplementedError("ZeroOptimizer is still a stub")

    def step(self):
        return NotImplemented

    def zero_grad(self):
        return NotImplemented


class StubStep(Split):
    def zero_grad(self):
        super().zero_grad()

    def step(self):
        return NotImplemented


class StubZeroGrad(Split):
    def step(self):
        super().step()

    def zero_grad(self):
        return NotImplemented


class NoStep:
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = list(parameters)

    def zero_grad(self):
        pass


class OtherNames(Split):
    def __init__(self, params, learning_rate=1e-3):
        super().__init__(params, learning_rate)


class StepWantsAClosure(Split):
    def step(self, closure):
        super().step()


class TakesFrozen(Split):
    """Its flat tensor holds what does not train, whose gradients are None."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        parameters = list(parameters)
        frozen = [p for p in parameters if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        super().__init__(parameters, lr, betas, eps, weight_decay)
        for p in frozen:
            p.requires_grad_(False)


class FrozenGradients(TakesFrozen):
    """The same, and counts on a gradient of every parameter that it holds."""

    def step(self):
        for p in self.parameters:
            if not p.requires_grad:
                p.grad = p.grad.contiguous()
        super().step()


class ForgetsNone(Split):
    """Takes for granted that every parameter has a gradient."""

    def step(self):
        for p in self.parameters:
            p.grad = p.grad.contiguous()
        super().step()


class UsedUpGenerator(Split):
    """Counts first, and then finds nothing left in the generator."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.count = sum(p.numel() for p in parameters)
        self.parameters = [p for p in parameters if p.requires_grad]

    def step(self):
        pass


class CutsTheRestOff(ByHand):
    """Each rank's part is Psi // N elements; what does not divide is nobody's."""

    def together(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return flat[: len(flat) // self.world_size * self.world_size].clone()

    def back(self, flat, part):
        super().back(flat, part)
        rest = sum(p.numel() for p in self.parameters) - len(flat)
        last = self.parameters[-1].data.flatten()
        if rest:
            flat.set_(torch.cat([flat, last[-rest:]]))


class PadsInFront(ByHand):
    """Zeros stand before the parameters, and they are taken apart from the begin."""

    def together(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return torch.cat([flat.new_zeros(-len(flat) % self.world_size), flat])


class SumsGradients(Split):
    def average(self, mine):
        return mine


class DividesTwice(Split):
    def average(self, mine):
        return mine / self.world_size**2


class OwnGradients(Split):
    """No reduction at all."""

    def reduce(self, grads):
        return grads.chunk(self.world_size)[self.rank].clone() * self.world_size


class TrainsAlone(Split):
    """Every rank for itself: the whole model, with its own gradients."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.inner = torch.optim.AdamW(self.parameters, lr, betas, eps, weight_decay)

    def step(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.inner.step()


class CountsThosePresent(Split):
    """Divides each gradient by how many ranks have one."""

    def step(self):
        have = torch.tensor([float(p.grad is not None) for p in self.parameters])
        dist.all_reduce(have)
        for p, count in zip(self.parameters, have.tolist(), strict=True):
            if p.grad is not None:
                p.grad *= self.world_size / count
        super().step()


class NoGather(Split):
    """D09: every rank updates its own part, and nobody hears of it."""

    def gather(self):
        pass


class GathersTheOld(Split):
    """Gathers before it has updated."""

    def gather(self):
        new = self.part.clone()
        self.part.copy_(self.old)
        super().gather()
        self.part.copy_(new)

    def step(self):
        self.old = self.part.clone()
        super().step()


class GathersInAnotherOrder(Split):
    def gather(self):
        parts = list(self.flat.chunk(self.world_size))
        dist.all_gather(parts, self.part.clone())
        self.flat.copy_(torch.cat([part.clone() for part in parts[::-1]]))


class Coupled(ByHand):
    def adamw(self, p, grad):
        super().adamw(p, grad + self.weight_decay * p, decay=0.0)


class NoDecay(ByHand):
    def adamw(self, p, grad):
        super().adamw(p, grad, decay=0.0)


class DecayWithoutLr(ByHand):
    def adamw(self, p, grad):
        p *= 1 - self.weight_decay
        super().adamw(p, grad, decay=0.0)


class NoBiasCorrection(ByHand):
    def corrected(self):
        return self.m, self.v


class EpsInside(ByHand):
    def denominator(self, v):
        return (v + self.eps).sqrt()


class CounterStays(ByHand):
    def step(self):
        self.t = 0
        super().step()


class CounterBeginsAtZero(ByHand):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.t = -1


class StateAnew(ByHand):
    """Makes m and v in every step."""

    def step(self):
        self.m, self.v, self.t = torch.zeros_like(self.m), torch.zeros_like(self.v), 0
        super().step()


class BetasSwapped(ByHand):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas[::-1], eps, weight_decay)


class IgnoresEps(Split):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, weight_decay=weight_decay)


class NeverClears(Split):
    def zero_grad(self):
        pass


class ClearsWithinStep(Split):
    """A step that clears only what the first parameter holds."""

    def zero_grad(self):
        self.parameters[0].grad = None


class NoMaster(Split):
    """bf16 parameters are updated as they are; m and v are fp32."""

    def step(self):
        super().step()
        self.shard.copy_(self.part)


class NarrowState(Split):
    """m, v and the shard in bf16."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.shard = self.part
        self.inner = torch.optim.AdamW([self.shard], lr, betas, eps, weight_decay)

    def average(self, mine):
        return (mine.float() / self.world_size).to(self.shard.dtype)


class NarrowMoments(ByHand):
    """The copy is fp32, m and v are kept in the parameters' dtype."""

    def step(self):
        dtype = self.parameters[0].dtype
        self.m, self.v = self.m.float(), self.v.float()
        super().step()
        self.m, self.v = self.m.to(dtype), self.v.to(dtype)


class AllReduces(Split):
    """All ranks get the whole sum, and use their part of it."""

    def reduce(self, grads):
        dist.all_reduce(grads)
        return grads.chunk(self.world_size)[self.rank].clone()


class GathersGradients(Split):
    def reduce(self, grads):
        everyone = [torch.empty_like(grads) for _ in range(self.world_size)]
        dist.all_gather(everyone, grads)
        return sum(everyone).chunk(self.world_size)[self.rank].clone()


class ReducesTwice(Split):
    def reduce(self, grads):
        super().reduce(grads.clone())
        return super().reduce(grads)


class WholeSecondMoment(ByHand):
    """v is kept for the whole model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.whole = torch.zeros(len(self.v) * self.world_size)
        self.v = self.whole.chunk(self.world_size)[self.rank]


class KeepsAMaster(Split):
    """A copy of the part, in fp32 as well."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = self.shard.clone()


class KeepsTheOldFlat(Split):
    """A second copy of all parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.old = self.flat.clone()


class WholeParameters:
    """Rank r updates parameters r, r + N, ...: whole ones, and as many as it happens."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.mine = {p: p.data.float() for p in self.parameters[self.rank :: self.world_size]}
        self.inner = torch.optim.AdamW(self.mine.values(), lr, betas, eps, weight_decay)

    def step(self):
        for number, p in enumerate(self.parameters):
            grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.reduce(grad, number % self.world_size)
            if p in self.mine:
                self.mine[p].grad = grad.float() / self.world_size
        self.inner.step()
        self.inner.zero_grad()
        for number, p in enumerate(self.parameters):
            if p in self.mine:
                p.data.copy_(self.mine[p])
            dist.broadcast(p.data, number % self.world_size)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class KeepsGrad(Split):
    """The shard's gradient stays until the next step."""

    def step(self):
        grads = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        self.shard.grad = self.average(self.reduce(grads))
        self.inner.step()
        self.part.copy_(self.shard)
        self.gather()


WRONG = [
    (ZeroOptimizer, "not_attempted"),
    (StubStep, "half_attempted"),
    (StubZeroGrad, "half_attempted"),
    (NoStep, "no_step"),
    (OtherNames, "wrong_signature"),
    (StepWantsAClosure, "wrong_signature"),
    (TakesFrozen, "frozen_parameter"),
    (FrozenGradients, "frozen_parameter"),
    (ForgetsNone, "no_gradient"),
    (UsedUpGenerator, "nothing_updated"),
    (CutsTheRestOff, "remainder"),
    (PadsInFront, ("wrong_places", "wrong_values")),
    (SumsGradients, "sum"),
    (DividesTwice, "divided_twice"),
    (OwnGradients, "own_parts"),
    (TrainsAlone, "not_averaged"),
    (CountsThosePresent, "present"),
    (NoGather, "not_gathered"),
    (GathersTheOld, "not_gathered"),
    (GathersInAnotherOrder, "wrong_places"),
    (Coupled, "coupled"),
    (NoDecay, "no_decay"),
    (DecayWithoutLr, "decay_without_lr"),
    (NoBiasCorrection, "no_bias_correction"),
    (EpsInside, "eps_inside"),
    (CounterStays, "step_stuck"),
    (CounterBeginsAtZero, "not_finite"),
    (StateAnew, "state_lost"),
    (BetasSwapped, "betas_swapped"),
    (IgnoresEps, "default_eps"),
    (NeverClears, "never_cleared"),
    (ClearsWithinStep, "never_cleared"),
    (NoMaster, "no_master"),
    (NarrowState, ("no_master", "narrow_state")),
    (NarrowMoments, "narrow_state"),
    (AllReduces, "all_reduce"),
    (GathersGradients, "all_gather_gradients"),
    (ReducesTwice, "reduced_twice"),
    (WholeSecondMoment, "one_moment_whole"),
    (KeepsAMaster, "master_kept"),
    (KeepsGrad, "master_kept"),
    (KeepsTheOldFlat, "copy_kept"),
    (WholeParameters, "unbalanced"),
]
