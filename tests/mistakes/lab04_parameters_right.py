"""Right answers to exercise 4.3, `ZeroParameters`, written differently. The first is the notebook's.

Wrong ones stand in `lab04_parameters`.
"""

import torch
import torch.distributed as dist


class ZeroParameters(torch.nn.Module):
    """A rank keeps its part of every parameter; the whole exists from before its use until after it."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__()
        self.module, self.world_size = module, dist.get_world_size()
        self.parts = {p: self.pad(p.data).chunk(self.world_size)[dist.get_rank()].clone() for p in module.parameters()}
        self.shards = {p: part.float() for p, part in self.parts.items() if p.requires_grad}
        self.inner = torch.optim.AdamW(self.shards.values(), lr, betas, eps, weight_decay)
        for p in self.shards:
            p.register_post_accumulate_grad_hook(self.reduce)
        for owner in module.modules():
            if any(True for _ in owner.parameters(recurse=False)):
                owner.register_forward_pre_hook(self.gather)
                owner.register_forward_hook(self.after_forward)
        self.free(self.parts)

    def pad(self, tensor):
        return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size))

    def gather(self, owner, *_):
        for p in owner.parameters(recurse=False):
            full = p.new_empty(self.world_size * len(self.parts[p]))
            dist.all_gather(list(full.chunk(self.world_size)), self.parts[p])
            p.untyped_storage().resize_(p.nbytes)
            p.data.copy_(full[: p.numel()].view_as(p))

    def free(self, parameters):
        for p in parameters:
            p.untyped_storage().resize_(0)

    def after_forward(self, owner, args, out):
        self.free(owner.parameters(recurse=False))
        if out.requires_grad:
            out.register_hook(lambda grad: self.gather(owner))

    def forward(self, *args):
        return self.module(*args)

    def reduce(self, p):
        mine = torch.empty_like(self.parts[p])
        dist.reduce_scatter(mine, list(self.pad(p.grad).chunk(self.world_size)))
        p.grad = None
        self.free([p])
        shard, mean = self.shards[p], mine.float() / self.world_size
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def step(self):
        self.inner.step()
        for p, shard in self.shards.items():
            self.parts[p].copy_(shard)
        self.free(self.parts)  # what is frozen had no gradient to end its use in backward

    def zero_grad(self):
        self.inner.zero_grad()


class Split(ZeroParameters):
    """The same in parts, each of which a wrong answer may get wrong."""

    def gather(self, owner, *_):
        for p in owner.parameters(recurse=False):
            self.fill(p, self.gathered(p))

    def gathered(self, p):
        full = p.new_empty(self.world_size * len(self.parts[p]))
        dist.all_gather(list(full.chunk(self.world_size)), self.parts[p])
        return full

    def fill(self, p, full):
        p.untyped_storage().resize_(p.nbytes)
        p.data.copy_(full[: p.numel()].view_as(p))

    def reduce(self, p):
        mine = self.scattered(p, self.pad(p.grad))
        self.clear(p)
        self.add(self.shards[p], mine.float() / self.world_size)

    def scattered(self, p, grad):
        mine = torch.empty_like(self.parts[p])
        dist.reduce_scatter(mine, list(grad.chunk(self.world_size)))
        return mine

    def clear(self, p):
        p.grad = None
        self.free([p])

    def add(self, shard, mean):
        shard.grad = mean if shard.grad is None else shard.grad + mean


class ModuleHooks(Split):
    """A module's own backward hooks, with what of it was gathered remembered."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        for owner in module.modules():
            if any(True for _ in owner.parameters(recurse=False)):
                owner.register_full_backward_pre_hook(self.gather)

    def gather(self, owner, *_):
        if all(p.untyped_storage().nbytes() == 0 for p in owner.parameters(recurse=False)):
            super().gather(owner)

    def after_forward(self, owner, args, out):
        self.free(owner.parameters(recurse=False))


class SavedTensors(Split):
    """No backward hooks on modules: autograd keeps the name of a parameter, and asks for it when it needs it."""

    def after_forward(self, owner, args, out):
        self.free(owner.parameters(recurse=False))

    def forward(self, *args):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            return self.module(*args)

    def pack(self, tensor):
        p = tensor if tensor._base is None else tensor._base
        for each in self.parts:
            if each is p or (p.shape == each.shape and p.untyped_storage()._cdata == each.untyped_storage()._cdata):
                return each, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        p, shape, stride, offset = packed
        full = self.gathered(p)[: p.numel()].clone()
        return full.as_strided(shape, stride, offset)


class UnitAtOnce(Split):
    """A module's parameters travel together, in one flat tensor."""

    def gather(self, owner, *_):
        own = list(owner.parameters(recurse=False))
        mine = torch.cat([self.parts[p] for p in own])
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        sizes = [len(self.parts[p]) for p in own]
        by_rank = [each.split(sizes) for each in everyone]
        for number, p in enumerate(own):
            self.fill(p, torch.cat([parts[number] for parts in by_rank]))


class MasterOnly(Split):
    """The fp32 part is all that a rank keeps, also where parameters are bf16."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(module, lr, betas, eps, weight_decay)
        self.parts = {p: self.shards.get(p, part) for p, part in self.parts.items()}

    def gathered(self, p):
        part = self.parts[p].to(p.dtype)
        full = p.new_empty(self.world_size * len(part))
        dist.all_gather(list(full.chunk(self.world_size)), part)
        return full

    def scattered(self, p, grad):
        mine = grad.new_empty(len(self.parts[p]))
        dist.reduce_scatter(mine, list(grad.chunk(self.world_size)))
        return mine

    def step(self):
        self.inner.step()
        self.free(self.parts)


class NotAModule:
    """No torch.nn.Module: a plain class that can be called."""

    def __init__(self, module, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.inner = Split(module, lr, betas, eps, weight_decay)

    def __call__(self, *args):
        return self.inner(*args)

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


RIGHT = [
    ZeroParameters,
    Split,
    ModuleHooks,
    SavedTensors,
    UnitAtOnce,
    MasterOnly,
    NotAModule,
]
