"""Right answers to exercise 4.1, `ZeroOptimizer`, written differently. The first is the notebook's.

Wrong ones stand in `lab04_state`.
"""

import torch
import torch.distributed as dist


class ZeroOptimizer:
    """Parameters become views of one flat, padded tensor, of which each rank updates its own part."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.flat = self.flatten([p.data for p in self.parameters])
        begin = 0
        for p in self.parameters:
            p.data = self.flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        self.part = self.flat.chunk(self.world_size)[self.rank]
        self.shard = self.part.float()  # in fp32 this is the part itself, in bf16 a copy
        self.inner = torch.optim.AdamW([self.shard], lr, betas, eps, weight_decay)

    def flatten(self, tensors):
        """One flat tensor, with zeros behind it, so that the number of ranks divides its length."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.world_size))

    def step(self):
        grads = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        mine = torch.empty_like(self.part)
        dist.reduce_scatter(mine, list(grads.chunk(self.world_size)))
        self.shard.grad = mine.float() / self.world_size
        self.inner.step()
        self.shard.grad = None
        self.part.copy_(self.shard)
        dist.all_gather(list(self.flat.chunk(self.world_size)), self.part.clone())

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def _pad(tensors, world_size):
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return torch.cat([flat, flat.new_zeros(-len(flat) % world_size)])


class Split(ZeroOptimizer):
    """The same in parts, each of which a wrong answer may get wrong."""

    def reduce(self, grads):
        mine = torch.empty_like(self.part)
        dist.reduce_scatter(mine, list(grads.chunk(self.world_size)))
        return mine

    def average(self, mine):
        return mine.float() / self.world_size

    def gather(self):
        dist.all_gather(list(self.flat.chunk(self.world_size)), self.part.clone())

    def step(self):
        grads = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        self.shard.grad = self.average(self.reduce(grads))
        self.inner.step()
        self.shard.grad = None
        self.part.copy_(self.shard)
        self.gather()


class ByHand:
    """AdamW written out; parameters stay where they are, and a fp32 copy of the part is made where needed."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lr, self.betas, self.eps, self.weight_decay, self.t = lr, betas, eps, weight_decay, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        part = self.cut(self.together([p.data for p in self.parameters]))
        self.m, self.v = torch.zeros(len(part)), torch.zeros(len(part))
        # In fp32 the part is cut out of the parameters again in each step.
        self.master = None if part.dtype == torch.float32 else part.float()

    def together(self, tensors):
        return _pad(tensors, self.world_size)

    def cut(self, flat):
        return flat.chunk(self.world_size)[self.rank]

    def back(self, flat, part):
        dist.all_gather(list(flat.chunk(self.world_size)), part)

    def corrected(self):
        return self.m / (1 - self.betas[0] ** self.t), self.v / (1 - self.betas[1] ** self.t)

    def denominator(self, v):
        return v.sqrt() + self.eps

    def adamw(self, p, grad, decay=None):
        decay = self.weight_decay if decay is None else decay
        p *= 1 - self.lr * decay
        self.m.mul_(self.betas[0]).add_(grad, alpha=1 - self.betas[0])
        self.v.mul_(self.betas[1]).addcmul_(grad, grad, value=1 - self.betas[1])
        m, v = self.corrected()
        p -= self.lr * m / self.denominator(v)

    def step(self):
        self.t += 1
        grads = self.together([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        parts = list(grads.chunk(self.world_size))
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        flat = self.together([p.data for p in self.parameters])
        p = self.cut(flat).clone() if self.master is None else self.master
        self.adamw(p, mine.float()[: len(p)] / self.world_size)
        self.back(flat, p.to(flat.dtype))
        begin = 0
        for each in self.parameters:
            each.data.copy_(flat[begin : begin + each.numel()].view_as(each))
            begin += each.numel()

    def zero_grad(self):
        for p in self.parameters:
            if p.grad is not None:
                p.grad.zero_()


class PerParameter:
    """Every parameter is cut by itself, as FSDP2 does."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.shards = {}
        for p in parameters:
            if p.requires_grad:
                flat = _pad([p], self.n)
                p.data = flat[: p.numel()].view_as(p)
                part = flat.chunk(self.n)[self.rank]
                self.shards[p] = (flat, part, part.float())
        shards = [shard for _, _, shard in self.shards.values()]
        self.inner = torch.optim.AdamW(shards, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def step(self):
        for p, (_, part, shard) in self.shards.items():
            grad = _pad([torch.zeros_like(p) if p.grad is None else p.grad], self.n)
            mine = torch.empty_like(part)
            dist.reduce_scatter_tensor(mine, grad)
            shard.grad = mine.to(shard.dtype) / self.n
        self.inner.step()
        self.inner.zero_grad()
        for flat, part, shard in self.shards.values():
            part.copy_(shard)
            dist.all_gather_into_tensor(flat, part.clone())

    def zero_grad(self):
        for p in self.shards:
            p.grad = None


class ToTheOwners(Split):
    """One reduce towards each rank, and one broadcast from each, as DeepSpeed can do."""

    def reduce(self, grads):
        parts = grads.chunk(self.world_size)
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        return parts[self.rank].clone()

    def gather(self):
        for owner, part in enumerate(self.flat.chunk(self.world_size)):
            dist.broadcast(part, owner)


class Asynchronous(Split):
    """Issues, and waits for it later."""

    def reduce(self, grads):
        mine = torch.empty_like(self.part)
        work = dist.reduce_scatter(mine, list(grads.chunk(self.world_size)), async_op=True)
        work.wait()
        return mine

    def gather(self):
        work = dist.all_gather(list(self.flat.chunk(self.world_size)), self.part.clone(), async_op=True)
        work.wait()


class StateOnTheParameters(ByHand):
    """Where m and v hang does not matter, as long as they are a rank's own part."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parameters[0].m, self.parameters[0].v = self.m, self.v


class Reversed(ZeroOptimizer):
    """Which order the flat tensor has is an answer's own affair."""

    def __init__(self, parameters, *args, **kwargs):
        super().__init__(list(parameters)[::-1], *args, **kwargs)


class ParameterOfThePart(Split):
    """AdamW steps a Parameter that shares the shard's memory."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.owned = torch.nn.Parameter(self.shard)
        self.inner = torch.optim.AdamW([self.owned], lr, betas, eps, weight_decay)

    def step(self):
        grads = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        self.owned.grad = self.average(self.reduce(grads))
        self.inner.step()
        self.owned.grad = None
        self.part.copy_(self.shard)
        self.gather()


RIGHT = [
    ZeroOptimizer,
    Split,
    ByHand,
    PerParameter,
    ToTheOwners,
    Asynchronous,
    StateOnTheParameters,
    Reversed,
    ParameterOfThePart,
]
