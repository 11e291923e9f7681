"""Wrong answers to exercise 2.3, `accumulate`, with the cause each must be told. Right ones and cheats stand beside.

What is judged, and in which order, stands in `labkit.labs.lab02.accumulate`.
"""

import lab02_accumulate_more as more
import lab02_accumulate_right as others
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab02_accumulate_right import (
    backwards,
    mean_of,
    reduce_gradients,
    right_one,
    sum_of,
    totals,
)

RIGHT = [*others.RIGHT, *more.RIGHT]
CHEATS = [*others.CHEATS, *more.CHEATS]


def mean_of_means(model, microbatches):
    """What most training loops do."""
    total = 0.0
    for tokens, targets in microbatches:
        loss = mean_of(model, tokens, targets) / len(microbatches)
        loss.backward()
        total += loss.item()
    reduce_gradients(model, dist.get_world_size())
    loss = torch.tensor(total)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def mean_over_all_microbatches(model, microbatches):
    total = 0.0
    for tokens, targets in microbatches:
        loss = mean_of(model, tokens, targets)
        loss.backward()
        total += loss.item()
    total, number = totals(total, len(microbatches))
    reduce_gradients(model, number)
    return total / number


def ranks_weigh_alike(model, microbatches):
    loss_sum, count = backwards(model, microbatches)
    for parameter in model.parameters():
        parameter.grad /= count
    reduce_gradients(model, dist.get_world_size())
    loss = torch.tensor(loss_sum / count)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def divided_by_world_size_too(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model, count * dist.get_world_size())
    return loss_sum / count


def divided_by_own_tokens(model, microbatches):
    loss_sum, count = backwards(model, microbatches)
    reduce_gradients(model, count)
    total_loss, total = totals(loss_sum, count)
    return total_loss / total


def not_divided(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model)
    return loss_sum / count


def reduced_in_every_microbatch(model, microbatches):
    """Right values, each gradient summed on its own; with k times the bytes."""
    held = [torch.zeros_like(parameter) for parameter in model.parameters()]
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + int((targets != -100).sum())
        for parameter, sum_ in zip(model.parameters(), held, strict=True):
            dist.all_reduce(parameter.grad)
            sum_ += parameter.grad
            parameter.grad = None
    loss_sum, count = totals(loss_sum, count)
    for parameter, sum_ in zip(model.parameters(), held, strict=True):
        parameter.grad = sum_ / count
    return loss_sum / count


def reduced_for_as_many_as_the_longest_rank_has(model, microbatches):
    """Right values on all ranks, without a hang, and every microbatch still costs a gradient."""
    longest = torch.tensor(len(microbatches))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    held = [torch.zeros_like(parameter) for parameter in model.parameters()]
    loss_sum, count = 0.0, 0
    for number in range(int(longest)):
        if number < len(microbatches):
            tokens, targets = microbatches[number]
            loss = sum_of(model, tokens, targets)
            loss.backward()
            loss_sum, count = loss_sum + loss.item(), count + int((targets != -100).sum())
        for parameter, sum_ in zip(model.parameters(), held, strict=True):
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(grad)
            sum_ += grad
            parameter.grad = None
    loss_sum, count = totals(loss_sum, count)
    for parameter, sum_ in zip(model.parameters(), held, strict=True):
        parameter.grad = sum_ / count
    return loss_sum / count


def sums_counts_in_the_loop(model, microbatches):
    """Fine while all ranks have as many microbatches; then some wait for ever."""
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward()
        total, counted = totals(loss.item(), int((targets != -100).sum()))
        loss_sum, count = loss_sum + total, count + counted
    reduce_gradients(model, count)
    return loss_sum / count


def sums_the_sum_again(model, microbatches):
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + int((targets != -100).sum())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    loss_sum, count = totals(loss_sum, count)
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def twice_for_safety(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model, count)
    reduce_gradients(model, dist.get_world_size())
    return loss_sum / count


def means_times_positions(model, microbatches):
    """Takes the mean back to a sum by all positions, ignored ones too: where shapes are equal, a mean of means."""
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = mean_of(model, tokens, targets) * targets.numel()
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + targets.numel()
    loss_sum, count = totals(loss_sum, count)
    reduce_gradients(model, count)
    return loss_sum / count


def counts_ignored_targets(model, microbatches):
    loss_sum, _ = backwards(model, microbatches)
    loss_sum, count = totals(loss_sum, sum(targets.numel() for _, targets in microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def does_not_know_of_ignored_targets(model, microbatches):
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets, ignored=-1)
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + targets.numel()
    loss_sum, count = totals(loss_sum, count)
    reduce_gradients(model, count)
    return loss_sum / count


def means_times_counts(model, microbatches):
    """nan where a microbatch has no counted token."""
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        counted = int((targets != -100).sum())
        loss = mean_of(model, tokens, targets) * counted
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + counted
    loss_sum, count = totals(loss_sum, count)
    reduce_gradients(model, count)
    return loss_sum / count


def clears_gradients_in_the_loop(model, microbatches):
    loss_sum, count = 0.0, 0
    for tokens, targets in microbatches:
        model.zero_grad()
        loss = sum_of(model, tokens, targets)
        loss.backward()
        loss_sum, count = loss_sum + loss.item(), count + int((targets != -100).sum())
    loss_sum, count = totals(loss_sum, count)
    reduce_gradients(model, count)
    return loss_sum / count


def sums_losses_only(model, microbatches):
    loss_sum, own = backwards(model, microbatches)
    loss_sum, count = totals(loss_sum, own)
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def stays_at_home(model, microbatches):
    loss_sum, count = backwards(model, microbatches)
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def returns_its_own_loss(model, microbatches):
    loss_sum, count = backwards(model, microbatches)
    _, total = totals(loss_sum, count)
    reduce_gradients(model, total)
    return loss_sum / max(1, count)


def returns_the_sum(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model, count)
    return loss_sum


def returns_the_mean_of_ranks(model, microbatches):
    loss_sum, count = backwards(model, microbatches)
    mean, _ = totals(loss_sum / max(1, count), 0)
    _, total = totals(0, count)
    reduce_gradients(model, total)
    return mean / dist.get_world_size()


def returns_a_tensor(model, microbatches):
    return torch.tensor(right_one(model, microbatches))


def returns_nothing(model, microbatches):
    right_one(model, microbatches)


def returns_the_last_loss(model, microbatches):
    right_one(model, microbatches)
    with torch.no_grad():
        return mean_of(model, *microbatches[-1]).item()


def leaves_before_the_sum(model, microbatches):
    if not microbatches:
        return 0.0
    return right_one(model, microbatches)


def reduces_only_what_it_has(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= count
    return loss_sum / count


def takes_grad_for_granted(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    for parameter, part in zip(
        model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
    ):
        parameter.grad.copy_(part.view_as(parameter) / count)
    return loss_sum / count


def one_backward_for_all(model, microbatches):
    """Right values, and every microbatch's activations at once."""
    losses = [sum_of(model, tokens, targets) for tokens, targets in microbatches]
    loss = torch.stack(losses).sum() if losses else 0 * sum(p.sum() for p in model.parameters())
    loss.backward()
    loss_sum, count = totals(loss.item(), sum(int((targets != -100).sum()) for _, targets in microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def one_large_batch(model, microbatches):
    """Rows are padded to one length, which a causal model does not mind."""
    loss = 0 * sum(p.sum() for p in model.parameters())
    if microbatches:
        longest = max(tokens.shape[1] for tokens, _ in microbatches)
        tokens = torch.cat([F.pad(each, (0, longest - each.shape[1])) for each, _ in microbatches])
        targets = torch.cat([F.pad(each, (0, longest - each.shape[1]), value=-100) for _, each in microbatches])
        loss = loss + sum_of(model, tokens, targets)
    loss.backward()
    loss_sum, count = totals(loss.item(), sum(int((targets != -100).sum()) for _, targets in microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def sends_float64(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        wide = grad.double()
        dist.all_reduce(wide)
        parameter.grad = (wide / count).float()
    return loss_sum / count


def sends_bfloat16(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        narrow = grad.bfloat16()
        dist.all_reduce(narrow)
        parameter.grad = narrow.float() / count
    return loss_sum / count


def all_gathers_gradients(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    for parameter in model.parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        everyone = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad)
        parameter.grad = torch.stack(everyone).sum(0) / count
    return loss_sum / count


def takes_the_step_too(model, microbatches):
    loss = right_one(model, microbatches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss


def clears_gradients_at_the_end(model, microbatches):
    loss = right_one(model, microbatches)
    model.zero_grad()
    return loss


def zeros_gradients_at_the_end(model, microbatches):
    loss = right_one(model, microbatches)
    model.zero_grad(set_to_none=False)
    return loss


def times_world_size(model, microbatches):
    """As for DDP, which would divide by it."""
    loss_sum, count = totals(*backwards(model, microbatches))
    reduce_gradients(model, count)
    for parameter in model.parameters():
        parameter.grad *= dist.get_world_size()
    return loss_sum / count


def with_gradients_of_an_earlier_backward(model, microbatches):
    """Looks at the loss first, with a graph, and backward runs twice."""
    backwards(model, microbatches)
    return right_one(model, microbatches)


WRONG = [
    (mean_of_means, "mean_of_means"),
    (mean_over_all_microbatches, "mean_of_means"),
    (ranks_weigh_alike, "mean_over_ranks"),
    (divided_by_world_size_too, "divided_by_world_size"),
    (divided_by_own_tokens, "local_tokens"),
    (not_divided, "summed"),
    (reduced_in_every_microbatch, "every_microbatch"),
    (reduced_for_as_many_as_the_longest_rank_has, "every_microbatch"),
    (sums_counts_in_the_loop, "uneven_numbers"),
    (sums_the_sum_again, "reduced_again"),
    (twice_for_safety, "too_many_bytes"),
    (means_times_positions, ("mean_of_means", "ignored_counted")),
    (counts_ignored_targets, "ignored_counted"),
    (does_not_know_of_ignored_targets, "raised"),
    (means_times_counts, "empty_microbatch"),
    (clears_gradients_in_the_loop, "last_microbatch"),
    (sums_losses_only, "not_reduced"),
    (stays_at_home, "not_reduced"),
    (returns_its_own_loss, "local_loss"),
    (returns_the_sum, "summed_loss"),
    (returns_the_mean_of_ranks, "loss_of_means"),
    (returns_a_tensor, "not_a_float"),
    (returns_nothing, "returns_nothing"),
    (returns_the_last_loss, "last_loss"),
    (leaves_before_the_sum, "no_microbatch"),
    (reduces_only_what_it_has, "no_microbatch"),
    (takes_grad_for_granted, "no_microbatch"),
    (one_backward_for_all, "all_graphs_held"),
    (one_large_batch, "one_large_batch"),
    (sends_float64, "sent_as_float64"),
    (sends_bfloat16, "precision_lost"),
    (all_gathers_gradients, ("gathered", "too_many_bytes")),
    (takes_the_step_too, "parameters_changed"),
    (clears_gradients_at_the_end, "no_gradient"),
    (zeros_gradients_at_the_end, "no_gradient_left"),
    (times_world_size, "twice"),
    (with_gradients_of_an_earlier_backward, "twice"),
    *more.WRONG,
]
