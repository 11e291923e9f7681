"""More wrong answers to exercise 2.2: of hooks, waits, the start, and what travels; the cause each must be told.

The first ones stand in `lab02_bucketed`.
"""

import time

import torch
import torch.distributed as dist
from lab02_bucketed_right import FlatBuckets

# Hooks


class LastParameterOnly(FlatBuckets):
    """Takes for granted that a bucket's last parameter is the last to have its gradient."""

    def ready(self, parameter):
        number = self.bucket_of[parameter]
        if parameter is self.buckets[number][-1]:
            self.left[number] = 0
            while len(self.works) < len(self.buckets) and self.left[len(self.works)] == 0:
                self.send()


class OneCounterForAll(FlatBuckets):
    """Sends a bucket when as many gradients came as it and those before it hold."""

    def begin(self):
        super().begin()
        self.came = 0

    def ready(self, parameter):
        self.came += 1
        while len(self.works) < len(self.buckets) and self.came >= sum(map(len, self.buckets[: len(self.works) + 1])):
            self.send()


class HooksTooSoon(FlatBuckets):
    """A tensor's own hook comes before its gradient is in .grad."""

    def __init__(self, module, bucket_bytes):
        torch.nn.Module.__init__(self)
        self.module = module
        self.start()
        self.buckets = self.make_buckets([p for p in module.parameters() if p.requires_grad], bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.begin()
        self.hook()

    def hook(self):
        for parameter in self.bucket_of:
            parameter.register_hook(lambda grad, p=parameter: self.ready(p))


class ModuleHooks(HooksTooSoon):
    def hook(self):
        for part in self.module.modules():
            own = [p for p in part.parameters(recurse=False) if p in self.bucket_of]
            part.register_full_backward_hook(lambda *_, own=own: ([self.ready(p) for p in own], None)[1])


class HookedTwice(HooksTooSoon):
    """A bucket is full when half of its gradients have come twice."""

    def hook(self):
        for parameter in (*self.bucket_of, *self.bucket_of):
            parameter.register_post_accumulate_grad_hook(self.ready)


# Waits


class WaitsAtOnceByFuture(FlatBuckets):
    def send(self):
        super().send()
        self.works[-1][1].get_future().wait()


class PollsInHooks(FlatBuckets):
    def send(self):
        super().send()
        while not self.works[-1][1].is_completed():
            time.sleep(1e-4)


class AsksAFutureAndSleeps(FlatBuckets):
    def send(self):
        super().send()
        self.works[-1][1].get_future()

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        time.sleep(0.2)
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class WaitsForTheLastOnly(FlatBuckets):
    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        self.works[-1][1].wait()
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class DividesBeforeItWaits(FlatBuckets):
    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, work), bucket in zip(self.works, self.buckets, strict=True):
            flat /= dist.get_world_size()
            work.wait()
            self.apart(flat, bucket)
        self.begin()


class WaitsInTheNextForward(FlatBuckets):
    before = ()

    def forward(self, *args):
        for _, work in self.before:
            work.wait()
        return self.module(*args)

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        self.before = self.works
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat, bucket)
        self.begin()


# The start, and how finish is called


class StartsByStateDict(FlatBuckets):
    """A buffer with persistent=False is not in it."""

    def start(self):
        for each in self.module.state_dict().values():
            dist.broadcast(each, src=0)


class StartsFlat(FlatBuckets):
    """One flat tensor of everything, of one dtype."""

    def start(self):
        everything = [*self.module.parameters(), *self.module.buffers()]
        flat = torch.cat([each.data.flatten().to(everything[0].dtype) for each in everything])
        dist.broadcast(flat, src=0)
        for each, part in zip(everything, flat.split([each.numel() for each in everything]), strict=True):
            each.data = part.view_as(each)


class FinishTakesTheModel(FlatBuckets):
    def finish(self, model):
        super().finish()


# Ranks


class DividesByFour(FlatBuckets):
    def apart(self, flat, bucket):
        super().apart(flat * dist.get_world_size() / 4, bucket)


class PowersOfTwo(FlatBuckets):
    def finish(self):
        assert dist.get_world_size() in (1, 2, 4, 8), "a power of two, please"
        super().finish()


class NotOnFourRanks(FlatBuckets):
    def finish(self):
        if dist.get_world_size() == 4:
            raise RuntimeError("four ranks are not supported")
        super().finish()


# What travels, and where it goes


class AddsTheMean(FlatBuckets):
    def apart(self, flat, bucket):
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += part.view_as(parameter)


class LeavesNone(FlatBuckets):
    """A gradient that took no part here stays None, whatever the other ranks have."""

    def apart(self, flat, bucket):
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))


class CoarseOnTheWire(FlatBuckets):
    """float32 travels as bfloat16, and float64 as it is."""

    def together(self, bucket):
        flat = super().together(bucket)
        return flat.bfloat16() if flat.dtype == torch.float32 else flat

    def apart(self, flat, bucket):
        super().apart(flat.to(bucket[0].dtype), bucket)


class CoarseWhenLarge(CoarseOnTheWire):
    def together(self, bucket):
        return super().together(bucket) if len(self.bucket_of) > 30 else FlatBuckets.together(self, bucket)


class DoubleOnTheWire(FlatBuckets):
    def together(self, bucket):
        return super().together(bucket).double()

    def apart(self, flat, bucket):
        super().apart(flat.to(bucket[0].dtype), bucket)


class ReduceScatters(FlatBuckets):
    """Both halves of an all_reduce by themselves."""

    def send(self):
        flat, n = self.together(self.buckets[len(self.works)]), dist.get_world_size()
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % n))
        shard = torch.empty(flat.numel() // n, dtype=flat.dtype)
        self.works.append((flat, shard, dist.reduce_scatter_tensor(shard, flat, async_op=True)))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, shard, work), bucket in zip(self.works, self.buckets, strict=True):
            work.wait()
            dist.all_gather_into_tensor(flat, shard)
            self.apart(flat[: sum(p.numel() for p in bucket)] / dist.get_world_size(), bucket)
        self.begin()


_RACE = ("not_waited", "touched_early")
WRONG = [
    (LastParameterOnly, "registration_order"),
    (OneCounterForAll, "registration_order"),
    (HooksTooSoon, "sent_too_soon"),
    (ModuleHooks, "sent_too_soon"),
    (HookedTwice, "sent_too_soon"),
    (WaitsAtOnceByFuture, "waits_early"),
    (PollsInHooks, "waits_early"),
    (AsksAFutureAndSleeps, _RACE),
    (WaitsForTheLastOnly, _RACE),
    (DividesBeforeItWaits, _RACE),
    (WaitsInTheNextForward, _RACE),
    (StartsByStateDict, "buffers_not_broadcast"),
    (StartsFlat, "wrong_start"),
    (FinishTakesTheModel, "wrong_signature"),
    (DividesByFour, "fixed_number"),
    (PowersOfTwo, "raised"),
    (NotOnFourRanks, "raised"),
    (AddsTheMean, "added_to_own"),
    (LeavesNone, "unused_parameter"),
    (CoarseOnTheWire, "dtype_lost"),
    (CoarseWhenLarge, "dtype_lost"),
    (DoubleOnTheWire, "wider_dtype"),
    (ReduceScatters, "other_operations"),
]
