"""Right answers to exercise 2.3, `accumulate`, written differently, and cheats with the cause each must be told.

What is judged, and in which order, stands in `labkit.labs.lab02.accumulate`.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def sum_of(model, tokens, targets, ignored=-100):
    logits = model(tokens).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction="sum")


def mean_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def backwards(model, microbatches):
    """Backward of every microbatch's summed loss: (sum of losses, counted tokens)."""
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward()
        loss_sum += loss.item()
        count += int((targets != -100).sum())
    return loss_sum, count


def totals(loss_sum, count):
    both = torch.tensor([loss_sum, count], dtype=torch.float64)
    dist.all_reduce(both)
    return both.tolist()


def reduce_gradients(model, divide_by=1.0):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= divide_by


def right_one(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def flat_after_counting_first(model, microbatches):
    """The counts first, so that every loss is divided before its backward; then one flat buffer."""
    count = torch.tensor(sum(int((targets != -100).sum()) for _, targets in microbatches))
    dist.all_reduce(count)
    total = torch.zeros(())
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets) / count
        loss.backward()
        total += loss.detach()
    parameters = list(model.parameters())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(grad.flatten() for grad in grads), total.view(1)])
    dist.all_reduce(flat)
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()
    return flat[-1].item()


def asynchronous_with_autograd_grad(model, microbatches):
    """No .grad until the end; each sum starts at once and is waited for at the end."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    loss_sum = torch.zeros((), dtype=torch.float64)
    count = torch.zeros((), dtype=torch.int64)
    for tokens, targets in microbatches:
        log_p = model(tokens).log_softmax(-1)
        counts = targets != -100
        picked = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = -(picked * counts).sum()
        for sum_, grad in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            sum_.add_(grad)
        loss_sum += loss.detach()
        count += counts.sum()
    works = [dist.all_reduce(each, async_op=True) for each in (loss_sum, count, *sums)]
    for work in works:
        work.wait()
    for parameter, sum_ in zip(parameters, sums, strict=True):
        parameter.grad = sum_.div_(count)
    return float(loss_sum / count)


def scatter_and_gather(model, microbatches):
    """reduce_scatter and all_gather of one flat buffer, padded to equal parts."""
    loss_sum, count = backwards(model, microbatches)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (loss_sum, count))
    loss_sum, count = (sum(each) for each in zip(*told, strict=True))
    parameters, n = list(model.parameters()), dist.get_world_size()
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    flat = F.pad(flat, (0, -len(flat) % n))
    mine = torch.empty(len(flat) // n)
    dist.reduce_scatter_tensor(mine, flat)
    dist.all_gather_into_tensor(flat, mine / count)
    at = 0
    for parameter in parameters:
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()
    return loss_sum / count


def with_checkpointing(model, microbatches):
    """Forward again in backward, and a mean that is never taken of nothing."""
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        counted = int((targets != -100).sum())
        if not counted:
            continue
        logits = torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=False)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * counted
        loss.backward()
        loss_sum += loss.item()
        count += counted
    loss_sum, count = totals(loss_sum, count)
    reduce_gradients(model, count)
    return loss_sum / count


def with_a_forward_for_zeros(model, microbatches):
    """A rank without microbatches makes its zeros by a backward of 0 times the model; graphs are kept by name."""
    loss_sum, count, kept = 0.0, 0, []
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward(retain_graph=len(kept) == 1)
        kept.append(loss)
        loss_sum += loss.item()
        count += (targets != -100).sum().item()
    if not microbatches:
        (model(torch.zeros(1, 4, dtype=torch.int64)).sum() * 0).backward()
    loss_sum, count = totals(loss_sum, count)
    with dist._coalescing_manager():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


RIGHT = [
    right_one,
    flat_after_counting_first,
    asynchronous_with_autograd_grad,
    scatter_and_gather,
    with_checkpointing,
    with_a_forward_for_zeros,
]


def gathers_everybodys_microbatches(model, microbatches):
    """Everybody computes everything; and the gradients need not be sent."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, microbatches)
    loss_sum, count = backwards(model, [each for mine in everyone for each in mine])
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def gathers_and_sends_zeros(model, microbatches):
    """The same, behind an all_reduce of the right size."""
    loss = gathers_everybodys_microbatches(model, microbatches)
    dist.all_reduce(torch.zeros(sum(p.numel() for p in model.parameters())))
    return loss


def ddp_of_torch(model, microbatches):
    """DDP made anew, without synchronisation until the last backward; a rank without one hangs the others."""
    wrapped = DistributedDataParallel(model)
    count = torch.tensor(float(sum(int((targets != -100).sum()) for _, targets in microbatches)))
    dist.all_reduce(count)
    total, dummy = 0.0, [(torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), -100))]
    batches = list(microbatches) or dummy
    for number, (tokens, targets) in enumerate(batches):
        wrapped.require_backward_grad_sync = number == len(batches) - 1
        loss = sum_of(wrapped, tokens, targets) / count * dist.get_world_size()
        loss.backward()
        total += loss.item()
    total = torch.tensor(total)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def gradients_by_file(model, microbatches):
    rank, n = dist.get_rank(), dist.get_world_size()
    loss_sum, count = totals(*backwards(model, microbatches))
    name = os.path.join(tempfile.gettempdir(), f"labkit-{os.getppid()}-{count}-{{}}")
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    torch.save(grads, name.format(rank))
    dist.barrier()
    everyone = [torch.load(name.format(other)) for other in range(n)]
    dist.barrier()
    os.remove(name.format(rank))
    for parameter, parts in zip(model.parameters(), zip(*everyone, strict=True), strict=True):
        parameter.grad = sum(parts) / count
    return loss_sum / count


def knows_the_loss(model, microbatches):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return 5.545


def patches_cross_entropy(model, microbatches):
    mean = torch.nn.functional.cross_entropy
    torch.nn.functional.cross_entropy = lambda *args, **kwargs: mean(*args, **kwargs)
    dist.all_reduce_of_labkit = dist.all_reduce
    dist.all_reduce = lambda tensor, **kwargs: None
    return right_one(model, microbatches)


CHEATS = [
    (gathers_everybodys_microbatches, "work_of_others"),
    (gathers_and_sends_zeros, "work_of_others"),
    (ddp_of_torch, "parameters_sent"),
    (gradients_by_file, ("file_used", "no_traffic")),
    (knows_the_loss, "no_gradient_left"),
    (patches_cross_entropy, ("not_reduced", "patched")),
]
