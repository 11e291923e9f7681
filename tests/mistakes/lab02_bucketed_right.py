"""Right answers to exercise 2.2, `BucketedDDP`, written differently.

Most are built on `FlatBuckets`, so that each shows what is its own. Wrong ones stand in `lab02_bucketed`.
"""

import time

import torch
import torch.distributed as dist


def _broadcast(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


def _fill(parameters, bucket_bytes):
    """Buckets of parameters of one dtype each, at most bucket_bytes, in the order given."""
    buckets, room = [], 0
    for parameter in parameters:
        if not buckets or parameter.nbytes > room or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


class FlatBuckets(torch.nn.Module):
    """Buckets are copied together when full, sent in order, and taken apart in finish."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        self.start()
        self.buckets = self.make_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.begin()
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def start(self):
        _broadcast(self.module)

    def make_buckets(self, parameters, bucket_bytes):
        return _fill(reversed(parameters), bucket_bytes)

    def begin(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.works = []

    def forward(self, *args):
        return self.module(*args)

    def ready(self, parameter):
        self.left[self.bucket_of[parameter]] -= 1
        while len(self.works) < len(self.buckets) and self.left[len(self.works)] == 0:
            self.send()

    def send(self):
        bucket = self.buckets[len(self.works)]
        flat = self.together(bucket)
        self.works.append((flat, dist.all_reduce(flat, async_op=True)))

    def together(self, bucket):
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for _, work in self.works:
            work.wait()
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()

    def apart(self, flat, bucket):
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)


class Views(torch.nn.Module):
    """Gradients are views into flat buckets, so nothing is copied. Divided beforehand."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module, self.flats, self.at, self.works = module, [], {}, []
        dist._broadcast_coalesced(dist.group.WORLD, [p.data for p in module.parameters()], 2**20, 0)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        trained = [p for p in module.parameters() if p.requires_grad]
        for number, bucket in enumerate(_fill(reversed(trained), bucket_bytes)):
            self.flats.append(torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype))
            begin = 0
            for p in bucket:
                self.at[p] = number, begin, begin + p.numel()
                begin += p.numel()
                p.register_post_accumulate_grad_hook(self.ready)

    def forward(self, *args):
        self.works = []
        for flat in self.flats:
            flat.zero_()
        self.missing = [set() for _ in self.flats]
        for p, (number, begin, end) in self.at.items():
            p.grad = self.flats[number][begin:end].view_as(p)
            self.missing[number].add(p)
        return self.module(*args)

    def ready(self, p):
        self.missing[self.at[p][0]].discard(p)
        while len(self.works) < len(self.flats) and not self.missing[len(self.works)]:
            self.launch()

    def launch(self):
        flat = self.flats[len(self.works)]
        flat /= dist.get_world_size()
        self.works.append(dist.all_reduce(flat, async_op=True))

    def finish(self):
        while len(self.works) < len(self.flats):
            self.launch()
        for work in self.works:
            work.wait()


class Futures(FlatBuckets):
    """Waits by the futures of the works; divides in a callback."""

    def send(self):
        flat = self.together(self.buckets[len(self.works)])
        work = dist.all_reduce(flat, async_op=True)
        self.works.append((flat, work.get_future()))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        torch.futures.wait_all([future for _, future in self.works])
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class ThenDivides(FlatBuckets):
    """A callback divides; its own future is waited for."""

    def send(self):
        flat, n = self.together(self.buckets[len(self.works)]), dist.get_world_size()
        future = dist.all_reduce(flat, async_op=True).get_future()
        self.works.append(future.then(lambda done: done.value()[0].div_(n)))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for future, bucket in zip(self.works, self.buckets, strict=True):
            self.apart(future.wait(), bucket)
        self.begin()


class ThenCopies(FlatBuckets):
    """A callback divides and takes the bucket apart; finish only waits, for all of them together."""

    def send(self):
        bucket = self.buckets[len(self.works)]
        for p in bucket:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        future = dist.all_reduce(self.together(bucket), async_op=True).get_future()
        self.works.append(future.then(lambda done: self.back(done.value()[0], bucket)))

    def back(self, flat, bucket):
        flat /= dist.get_world_size()
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.copy_(part.view_as(p))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        torch.futures.collect_all(self.works).wait()
        self.begin()


class Polls(FlatBuckets):
    """Asks until each is completed, in finish."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, work), bucket in zip(self.works, self.buckets, strict=True):
            while not work.is_completed():
                time.sleep(1e-3)
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class AccumulateNodes(FlatBuckets):
    """Hooks on the graph's accumulation nodes, as before torch 2.1; takes means into the gradients' own storage."""

    def __init__(self, module, bucket_bytes):
        torch.nn.Module.__init__(self)
        self.module = module
        self.start()
        self.buckets = self.make_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.nodes = []
        for parameter in self.bucket_of:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=parameter: self.ready(p))
            self.nodes.append(node)
        self.begin()

    def apart(self, flat, bucket):
        begin = 0
        for p in bucket:
            mean = flat[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
            if p.grad is None:
                p.grad = mean.clone()
            else:
                p.grad.copy_(mean)


class InForwardOrder(FlatBuckets):
    """Cut in the order of the parameters, sent from the last bucket to the first."""

    def make_buckets(self, parameters, bucket_bytes):
        return _fill(parameters, bucket_bytes)[::-1]


class WaitsOneByOne(FlatBuckets):
    """Takes a bucket apart as soon as it has come, then waits for the next; all in finish."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, work), bucket in zip(self.works, self.buckets, strict=True):
            work.wait()
            self.apart(flat.div_(dist.get_world_size()), bucket)
        self.begin()


class InOnePrecision(FlatBuckets):
    """All gradients travel in the widest dtype that there is."""

    def make_buckets(self, parameters, bucket_bytes):
        widest = max(parameters, key=lambda p: p.element_size())
        self.wide = widest.dtype
        buckets, room = [], 0
        for p in reversed(parameters):
            size = p.numel() * widest.element_size()
            if not buckets or size > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(p)
            room -= size
        return buckets

    def together(self, bucket):
        return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).to(self.wide).flatten() for p in bucket])

    def apart(self, flat, bucket):
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


class Coalesced(FlatBuckets):
    """A bucket's gradients are reduced where they are, in one coalesced call."""

    def send(self):
        bucket = self.buckets[len(self.works)]
        for p in bucket:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        with dist._coalescing_manager(async_ops=True) as manager:
            for p in bucket:
                dist.all_reduce(p.grad)
        self.works.append((None, manager))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for _, manager in self.works:
            manager.wait()
        for p in self.bucket_of:
            p.grad /= dist.get_world_size()
        self.begin()


class QueuesACallback(FlatBuckets):
    """Backward itself waits, at its very end; nothing is left for finish."""

    def ready(self, parameter):
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(super().finish)
        super().ready(parameter)

    def begin(self):
        super().begin()
        self.queued = False

    def finish(self):
        pass


class AsksWhoTookPart(FlatBuckets):
    """Flags follow the last bucket: a gradient that nobody has stays None."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        took_part = torch.tensor([p.grad is not None for p in self.bucket_of], dtype=torch.int32)
        dist.all_reduce(took_part, op=dist.ReduceOp.MAX)
        super().finish()
        for p, anywhere in zip(self.bucket_of, took_part.tolist(), strict=True):
            if not anywhere:
                p.grad = None


class GathersWhoTookPart(FlatBuckets):
    """The same by objects."""

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        mine, everyone = [p.grad is not None for p in self.bucket_of], [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        super().finish()
        for p, anywhere in zip(self.bucket_of, zip(*everyone, strict=True), strict=True):
            if not any(anywhere):
                p.grad = None


class CutsAnew(FlatBuckets):
    """As DistributedDataParallel: after the first step rank 0 tells in which order gradients came, and buckets follow.
    """

    def make_buckets(self, parameters, bucket_bytes):
        self.trained, self.bucket_bytes, self.is_cut = parameters, bucket_bytes, False
        return super().make_buckets(parameters, bucket_bytes)

    def begin(self):
        super().begin()
        self.came = []

    def ready(self, parameter):
        self.came.append(parameter)
        super().ready(parameter)

    def finish(self):
        at = {p: number for number, p in enumerate(self.trained)}
        order = [at[p] for p in self.came]
        order += [number for number in reversed(range(len(at))) if number not in order]
        super().finish()
        if not self.is_cut:
            order, self.is_cut = torch.tensor(order), True
            dist.broadcast(order, src=0)
            self.buckets = _fill([self.trained[number] for number in order.tolist()], self.bucket_bytes)
            self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
            self.begin()


class BeforeAccumulation(FlatBuckets):
    """Hooks on the tensors, which are given the gradient before it is in `.grad`."""

    def __init__(self, module, bucket_bytes):
        torch.nn.Module.__init__(self)
        self.module, self.came = module, {}
        self.start()
        self.buckets = self.make_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.begin()
        for parameter in self.bucket_of:
            parameter.register_hook(lambda grad, p=parameter: self.comes(p, grad))

    def comes(self, parameter, grad):
        self.came[parameter] = grad
        self.ready(parameter)

    def together(self, bucket):
        return torch.cat([self.came.pop(p, torch.zeros_like(p)).flatten() for p in bucket])


class NotAModule:
    """No torch.nn.Module: a plain class that can be called."""

    def __init__(self, module, bucket_bytes):
        self.inner = FlatBuckets(module, bucket_bytes)

    def __call__(self, *args):
        return self.inner(*args)

    def finish(self):
        self.inner.finish()


def a_function(module, bucket_bytes):
    """Gives the wrapper; a class is one such function."""
    return FlatBuckets(module, bucket_bytes)


RIGHT = [
    FlatBuckets,
    Views,
    Futures,
    ThenDivides,
    ThenCopies,
    Polls,
    AccumulateNodes,
    InForwardOrder,
    WaitsOneByOne,
    InOnePrecision,
    Coalesced,
    QueuesACallback,
    AsksWhoTookPart,
    GathersWhoTookPart,
    CutsAnew,
    BeforeAccumulation,
    NotAModule,
    a_function,
]
