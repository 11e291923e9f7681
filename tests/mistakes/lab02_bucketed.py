"""Wrong answers to exercise 2.2, `BucketedDDP`, with the cause each must be told.

More of them stand in `lab02_bucketed_more`, right ones in `lab02_bucketed_right`, cheats in `lab02_cheats`. What is
judged, and in which order, stands in `labkit.labs.lab02.bucketed`.
"""

import copy

import torch
import torch.distributed as dist
from lab02_bucketed_more import WRONG as MORE
from lab02_bucketed_right import FlatBuckets, _broadcast, _fill


class BucketedDDP(torch.nn.Module):
    """As a learner edition has it."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        raise NotImplementedError("BucketedDDP is still a stub")

    def forward(self, *args):
        return NotImplemented

    def finish(self):
        """Wait, and leave the mean."""
        return NotImplemented


class StubInit(FlatBuckets):
    """Its other methods are written, by inheritance."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        raise NotImplementedError("StubInit is still a stub")

    def finish(self):
        super().finish()


class StubFinish(FlatBuckets):
    def __init__(self, module, bucket_bytes):
        super().__init__(module, bucket_bytes)

    def finish(self):
        return NotImplemented


class OwnNotImplementedError(FlatBuckets):
    def __init__(self, module, bucket_bytes):
        raise NotImplementedError("buckets of this size")


class ForgetsToReturn(FlatBuckets):
    def forward(self, *args):
        self.module(*args)


class OneArgument(FlatBuckets):
    def forward(self, x):
        return self.module(x)


class TakesNoBucketBytes(FlatBuckets):
    def __init__(self, module):
        super().__init__(module, 2**20)


class FinishIsMissing(torch.nn.Module):
    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class PlainObject:
    def __init__(self, module, bucket_bytes):
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        pass


class TrainsACopy(FlatBuckets):
    def __init__(self, module, bucket_bytes):
        _broadcast(module)
        super().__init__(copy.deepcopy(module), bucket_bytes)


class NoBroadcast(FlatBuckets):
    def start(self):
        pass


class NoBuffers(FlatBuckets):
    def start(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)


class TrainedOnly(FlatBuckets):
    def start(self):
        for p in self.module.parameters():
            if p.requires_grad:
                dist.broadcast(p.data, src=0)
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)


class StartsFromTheMean(FlatBuckets):
    def start(self):
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)


class StartsFromTheLast(FlatBuckets):
    def start(self):
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.data, src=dist.get_world_size() - 1)


class Sums(FlatBuckets):
    def apart(self, flat, bucket):
        super().apart(flat * dist.get_world_size(), bucket)


class DividesTwice(FlatBuckets):
    def together(self, bucket):
        return super().together(bucket) / dist.get_world_size()


class NeverCopiesBack(FlatBuckets):
    def apart(self, flat, bucket):
        pass


class LastBucketOnlyWhenFull(FlatBuckets):
    """What is left in a bucket that is not full is forgotten."""

    def make_buckets(self, parameters, bucket_bytes):
        buckets = super().make_buckets(parameters, bucket_bytes)
        return buckets[:-1]


class TakesApartInAnotherOrder(FlatBuckets):
    def apart(self, flat, bucket):
        super().apart(flat, bucket[::-1])


class NeverBeginsAnew(FlatBuckets):
    """Counts and works of the first step stay."""

    def finish(self):
        for (flat, work), bucket in zip(self.works, self.buckets, strict=True):
            work.wait()
            self.apart(flat / dist.get_world_size(), bucket)


class CountsFrozen(FlatBuckets):
    """Its buckets hold frozen parameters too, whose hook cannot be registered."""

    def __init__(self, module, bucket_bytes):
        torch.nn.Module.__init__(self)
        self.module = module
        self.start()
        self.buckets = self.make_buckets(list(module.parameters()), bucket_bytes)
        self.bucket_of = {p: number for number, bucket in enumerate(self.buckets) for p in bucket}
        self.begin()
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self.ready)


class CountsTiedTwice(FlatBuckets):
    """A weight under two names is waited for twice."""

    def make_buckets(self, parameters, bucket_bytes):
        named = [p for _, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad]
        return _fill(reversed(named), bucket_bytes)

    def finish(self):
        assert len(self.works) == len(self.buckets), "a bucket is not full"
        super().finish()


class AsTheyCome(FlatBuckets):
    """Sends buckets as they fill, in whichever order that is; what did not fill goes last."""

    def begin(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.works, self.order = [], []

    def ready(self, parameter):
        number = self.bucket_of[parameter]
        self.left[number] -= 1
        if self.left[number] == 0:
            self.send_it(number)

    def send_it(self, number):
        flat = self.together(self.buckets[number])
        self.order.append(number)
        self.works.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for number in range(len(self.buckets)):
            if number not in self.order:
                self.send_it(number)
        for (flat, work), number in zip(self.works, self.order, strict=True):
            work.wait()
            self.apart(flat / dist.get_world_size(), self.buckets[number])
        self.begin()


class FilledAsTheyCome(FlatBuckets):
    """Gradients join one open bucket as they come; it goes when the next would not fit, the rest in finish."""

    def make_buckets(self, parameters, bucket_bytes):
        self.bucket_bytes = bucket_bytes
        return [parameters]

    def begin(self):
        self.open, self.size, self.works = [], 0, []

    def ready(self, parameter):
        if self.open and self.size + parameter.nbytes > self.bucket_bytes:
            self.flush()
        self.open.append(parameter)
        self.size += parameter.nbytes

    def flush(self):
        if self.open:
            flat = torch.cat([p.grad.flatten() for p in self.open])
            self.works.append((flat, dist.all_reduce(flat, async_op=True), self.open))
        self.open, self.size = [], 0

    def finish(self):
        self.flush()
        for flat, work, bucket in self.works:
            work.wait()
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class WaitsForEveryBucket(FlatBuckets):
    """Takes for granted that every bucket fills in backward."""

    def finish(self):
        assert len(self.works) == len(self.buckets), "some buckets did not fill"
        super().finish()


class OneDtypeForAll(FlatBuckets):
    """A flat buffer of the first parameter's dtype, whatever is copied into it."""

    def make_buckets(self, parameters, bucket_bytes):
        buckets, room = [], 0
        for p in reversed(parameters):
            if not buckets or p.nbytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets

    def together(self, bucket):
        flat, begin = torch.zeros(sum(p.numel() for p in bucket), dtype=min((p.dtype for p in bucket), key=str)), 0
        for p in bucket:
            if p.grad is not None:
                flat[begin : begin + p.numel()] = p.grad.flatten()
            begin += p.numel()
        return flat

    def apart(self, flat, bucket):
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)


class AfterBackward(FlatBuckets):
    """Buckets, and asynchronous, but all of it in finish."""

    def ready(self, parameter):
        pass


class Naive(torch.nn.Module):
    """One blocking all_reduce per parameter after backward."""

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        _broadcast(module)

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        for p in self.module.parameters():
            if p.requires_grad:
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(grad)
                p.grad = grad / dist.get_world_size()


class OneBucket(FlatBuckets):
    def make_buckets(self, parameters, bucket_bytes):
        return _fill(reversed(parameters), 2**40)


class EachByItself(FlatBuckets):
    def make_buckets(self, parameters, bucket_bytes):
        return _fill(reversed(parameters), 1)


class ClosesTooLate(FlatBuckets):
    """A bucket is closed once it holds bucket_bytes or more, as DistributedDataParallel does."""

    def make_buckets(self, parameters, bucket_bytes):
        buckets, room = [], 0
        for p in reversed(parameters):
            if not buckets or room <= 0 or p.dtype != buckets[-1][0].dtype:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets


class CountsElements(FlatBuckets):
    """bucket_bytes elements fill a bucket."""

    def make_buckets(self, parameters, bucket_bytes):
        return _fill(reversed(parameters), bucket_bytes * parameters[0].element_size())


class BlockingInHooks(FlatBuckets):
    def send(self):
        flat = self.together(self.buckets[len(self.works)])
        dist.all_reduce(flat)
        self.works.append((flat, None))

    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


class WaitsForTheOneBefore(FlatBuckets):
    """Never more than one all_reduce under way."""

    def send(self):
        if self.works:
            self.works[-1][1].wait()
        super().send()


class ForwardOrderFirstBucketFirst(FlatBuckets):
    """Buckets from the first parameter on, and sent in that order: the first is full when backward ends."""

    def make_buckets(self, parameters, bucket_bytes):
        return _fill(parameters, bucket_bytes)


class HalfOfThemInFinish(FlatBuckets):
    """The hooks stop half-way, and the rest goes when backward is over."""

    def ready(self, parameter):
        self.left[self.bucket_of[parameter]] -= 1
        while len(self.works) < (len(self.buckets) + 2) // 2 and self.left[len(self.works)] == 0:
            self.send()


class SendsAgainInFinish(FlatBuckets):
    """What the hooks sent is for nothing: finish averages once more."""

    def finish(self):
        super().finish()
        for p in self.bucket_of:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class NeverWaits(FlatBuckets):
    def finish(self):
        while len(self.works) < len(self.buckets):
            self.send()
        dist.barrier()
        for (flat, _), bucket in zip(self.works, self.buckets, strict=True):
            self.apart(flat / dist.get_world_size(), bucket)
        self.begin()


WRONG = [
    (BucketedDDP, "not_attempted"),
    (StubInit, "half_attempted"),
    (StubFinish, "half_attempted"),
    (OwnNotImplementedError, "raised"),
    (ForgetsToReturn, "forward_result"),
    (OneArgument, "raised"),
    (TakesNoBucketBytes, "wrong_signature"),
    (FinishIsMissing, "no_finish"),
    (PlainObject, "not_a_module"),
    (TrainsACopy, "no_gradients"),
    (NoBroadcast, "not_broadcast"),
    (NoBuffers, "buffers_not_broadcast"),
    (TrainedOnly, "frozen_not_broadcast"),
    (StartsFromTheMean, "start_averaged"),
    (StartsFromTheLast, "wrong_root"),
    (Sums, "not_divided"),
    (DividesTwice, "divided_twice"),
    (NeverCopiesBack, "still_own"),
    (LastBucketOnlyWhenFull, "last_bucket"),
    (TakesApartInAnotherOrder, "wrong_slices"),
    (NeverBeginsAnew, "later_steps"),
    (CountsFrozen, "frozen_parameter"),
    (CountsTiedTwice, "tied_weights"),
    (AsTheyCome, "unused_parameter"),
    (FilledAsTheyCome, "unused_parameter"),
    (WaitsForEveryBucket, "unused_parameter"),
    (OneDtypeForAll, "mixed_dtypes"),
    (AfterBackward, "after_backward"),
    (Naive, ("no_buckets", "after_backward")),
    (OneBucket, "one_bucket"),
    (EachByItself, "no_buckets"),
    (ClosesTooLate, "bucket_too_large"),
    (CountsElements, "bucket_too_large"),
    (BlockingInHooks, "blocking"),
    (WaitsForTheOneBefore, "waits_early"),
    (ForwardOrderFirstBucketFirst, "no_overlap"),
    (HalfOfThemInFinish, "exposed"),
    (SendsAgainInFinish, "sent_twice"),
    (NeverWaits, ("not_waited", "touched_early")),
    *MORE,
]
