"""Right answers to exercise 4.2, `ZeroGradients`, written differently. The first is the notebook's.

Wrong ones stand in `lab04_gradients`.
"""

import torch
import torch.distributed as dist


class ZeroGradients:
    """Every parameter is cut into one part per rank; a hook reduces its gradient as soon as that is there."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.flats = {p: self.pad(p.data) for p in parameters if p.requires_grad}
        self.parts, self.shards = {}, {}
        for p, flat in self.flats.items():
            p.data = flat[: p.numel()].view_as(p)
            self.parts[p] = flat.chunk(self.world_size)[self.rank]
            self.shards[p] = self.parts[p].float()  # in fp32 this is the part itself, in bf16 a copy
            p.register_post_accumulate_grad_hook(self.reduce)
        self.inner = torch.optim.AdamW(self.shards.values(), lr, betas, eps, weight_decay)

    def pad(self, tensor):
        """Flat, with zeros behind it, so that the number of ranks divides its length."""
        return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % self.world_size))

    def reduce(self, p):
        mine = torch.empty_like(self.parts[p])
        dist.reduce_scatter(mine, list(self.pad(p.grad).chunk(self.world_size)))
        p.grad = None
        shard = self.shards[p]
        mean = mine.float() / self.world_size
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def step(self):
        self.inner.step()
        for p, part in self.parts.items():
            part.copy_(self.shards[p])
            dist.all_gather(list(self.flats[p].chunk(self.world_size)), part.clone())

    def zero_grad(self):
        self.inner.zero_grad()


class Split(ZeroGradients):
    """The same in parts, each of which a wrong answer may get wrong."""

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

    def add(self, shard, mean):
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def gather(self, p):
        dist.all_gather(list(self.flats[p].chunk(self.world_size)), self.parts[p].clone())

    def step(self):
        self.inner.step()
        for p, part in self.parts.items():
            part.copy_(self.shards[p])
            self.gather(p)


class ByHand(Split):
    """AdamW written out, over parts of gradients that stay and are zeroed."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.numbers, self.t = (lr, betas, eps, weight_decay), 0
        self.state = [(s, torch.zeros_like(s), torch.zeros_like(s), torch.zeros_like(s)) for s in self.shards.values()]
        self.inner = self
        for shard, grad, _, _ in self.state:
            shard.grad = grad

    def add(self, shard, mean):
        shard.grad += mean

    def adamw(self, shard, grad, m, v):
        lr, (b1, b2), eps, decay = self.numbers
        shard *= 1 - lr * decay
        m.mul_(b1).add_(grad, alpha=1 - b1)
        v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        shard -= lr * (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + eps)

    def step(self):
        self.t += 1
        for each in self.state:
            self.adamw(*each)
        for p, part in self.parts.items():
            part.copy_(self.shards[p])
            self.gather(p)

    def zero_grad(self):
        for _, grad, _, _ in self.state:
            grad.zero_()


class InBuckets(Split):
    """Gradients are collected until they are as many as the largest parameter has, and go in one reduce_scatter."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.waiting, self.called = [], False
        super().__init__(parameters, lr, betas, eps, weight_decay)
        self.room = max(p.numel() for p in self.parts)

    def reduce(self, p):
        if self.waiting and sum(each.numel() for each in self.waiting) + p.numel() > self.room:
            self.send()
        self.waiting.append(p)
        if not self.called:
            torch.autograd.Variable._execution_engine.queue_callback(self.last)
        self.called = True

    def last(self):
        self.send()
        self.called = False

    def send(self):
        parts = [self.pad(p.grad).view(self.world_size, -1) for p in self.waiting]
        for p in self.waiting:
            p.grad = None
        together = torch.cat(parts, dim=1)
        mine = torch.empty_like(together[0])
        dist.reduce_scatter(mine, [row.clone() for row in together])
        for p, each in zip(self.waiting, mine.split([part.shape[1] for part in parts]), strict=True):
            self.add(self.shards[p], each.float() / self.world_size)
        self.waiting = []


class ToTheOwners(Split):
    """Rank r's part of a gradient goes to rank r by a reduce of its own."""

    def scattered(self, p, grad):
        parts = grad.chunk(self.world_size)
        for owner, part in enumerate(parts):
            dist.reduce(part, owner)
        return parts[self.rank].clone()

    def gather(self, p):
        for owner, part in enumerate(self.flats[p].chunk(self.world_size)):
            dist.broadcast(part, owner)


class OneBehind(Split):
    """A gradient's reduce_scatter goes on until the next gradient is there."""

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.under_way = None
        super().__init__(parameters, lr, betas, eps, weight_decay)

    def reduce(self, p):
        self.arrive()
        mine, parts = torch.empty_like(self.parts[p]), list(self.pad(p.grad).chunk(self.world_size))
        self.clear(p)
        self.under_way = (dist.reduce_scatter(mine, parts, async_op=True), mine, p, parts)

    def arrive(self):
        if self.under_way is not None:
            work, mine, p, _ = self.under_way
            work.wait()
            self.add(self.shards[p], mine.float() / self.world_size)
            self.under_way = None

    def step(self):
        self.arrive()
        super().step()


class GathersFlat(Split):
    """Parts are gathered back in one all_gather for all parameters."""

    def step(self):
        self.inner.step()
        for p, part in self.parts.items():
            part.copy_(self.shards[p])
        mine = torch.cat(list(self.parts.values()))
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        sizes = [len(part) for part in self.parts.values()]
        by_rank = [each.split(sizes) for each in everyone]
        for number, flat in enumerate(self.flats.values()):
            flat.copy_(torch.cat([parts[number] for parts in by_rank]))


RIGHT = [
    ZeroGradients,
    Split,
    ByHand,
    InBuckets,
    ToTheOwners,
    OneBehind,
    GathersFlat,
]
