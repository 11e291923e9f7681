"""More answers to exercise 2.3, `accumulate`: graphs held, sums not waited for, work done twice, odd ways to send.

Right ones, wrong ones and cheats with the cause each must be told. The most common ones stand in `lab02_accumulate`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lab02_accumulate_right import backwards, reduce_gradients, right_one, sum_of, totals


def counted(targets):
    return int((targets != -100).sum())


def counted_in(microbatches):
    return sum(counted(targets) for _, targets in microbatches)


def zeros_for_none(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def flat_of(model):
    zeros_for_none(model)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def put(model, flat):
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter).clone()
        at += parameter.numel()


# Graphs


def one_backward_then_looks(model, microbatches):
    """The loss is worked out again without a graph, so that the last forward finds nothing held."""
    if microbatches:
        sum(sum_of(model, tokens, targets) for tokens, targets in microbatches).backward()
    with torch.no_grad():
        loss_sum = sum(sum_of(model, tokens, targets).item() for tokens, targets in microbatches)
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def in_groups(model, microbatches, groups):
    loss_sum = 0.0
    for group in groups:
        if group:
            loss = sum(sum_of(model, tokens, targets) for tokens, targets in group)
            loss.backward()
            loss_sum += loss.item()
            del loss
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def all_but_the_last_at_once(model, microbatches):
    return in_groups(model, microbatches, (microbatches[:-1], microbatches[-1:]))


def half_of_them_at_once(model, microbatches):
    half = len(microbatches) // 2
    return in_groups(model, microbatches, (microbatches[:half], microbatches[half:]))


def forwards_then_backwards(model, microbatches):
    losses = [sum_of(model, tokens, targets) for tokens, targets in microbatches]
    for loss in losses:
        loss.backward()
    loss_sum, count = totals(sum(loss.item() for loss in losses), counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def retains_graphs(model, microbatches):
    total = torch.zeros(())
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss.backward(retain_graph=True)
        total = total + loss
    loss_sum, count = totals(total.item(), counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


# Waits


def waits_for_the_last_only(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    zeros_for_none(model)
    for parameter in model.parameters():
        work = dist.all_reduce(parameter.grad, async_op=True)
    work.wait()
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def never_waits(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    zeros_for_none(model)
    for parameter in model.parameters():
        parameter.grad /= count
        dist.all_reduce(parameter.grad, async_op=True)
    return loss_sum / count


def never_waits_but_blocks_later(model, microbatches):
    """gloo works in order here, so that the sums are made by luck."""
    loss_sum, own = backwards(model, microbatches)
    _, count = totals(0, own)
    zeros_for_none(model)
    for parameter in model.parameters():
        parameter.grad /= count
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, async_op=True)
    loss_sum, _ = totals(loss_sum, 0)
    dist.barrier()
    return loss_sum / count


# Traffic and work


def gathers_targets_to_count(model, microbatches):
    loss_sum, _ = backwards(model, microbatches)
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, [targets.tolist() for _, targets in microbatches])
    count = sum(each != -100 for targets in sum(told, []) for row in targets for each in row)
    loss_sum, _ = totals(loss_sum, 0)
    reduce_gradients(model, count)
    return loss_sum / count


def gather_and_broadcast(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    flat, root = flat_of(model), dist.get_rank() == 0
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())] if root else None
    dist.gather(flat, everyone, 0)
    if root:
        flat = sum(everyone)
    dist.broadcast(flat, 0)
    put(model, flat / count)
    return loss_sum / count


def everyone_broadcasts(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    flat = flat_of(model)
    total = torch.zeros_like(flat)
    for rank in range(dist.get_world_size()):
        each = flat.clone() if rank == dist.get_rank() else torch.empty_like(flat)
        dist.broadcast(each, rank)
        total += each
    put(model, total / count)
    return loss_sum / count


def warms_up(model, microbatches):
    backwards(model, microbatches)
    model.zero_grad()
    return right_one(model, microbatches)


def one_backward_per_parameter(model, microbatches):
    parameters, loss_sum = list(model.parameters()), 0.0
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        for sum_, parameter in zip(sums, parameters, strict=True):
            sum_ += torch.autograd.grad(loss, parameter, retain_graph=True)[0]
        loss_sum += loss.item()
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    for sum_, parameter in zip(sums, parameters, strict=True):
        dist.all_reduce(sum_)
        parameter.grad = sum_ / count
    return loss_sum / count


# Values


def flat_never_copied_back(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    flat = flat_of(model)
    dist.all_reduce(flat)
    flat /= count
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


def parameters_reduced_not_gradients(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    zeros_for_none(model)
    for parameter in model.parameters():
        mean = parameter.detach().clone()
        dist.all_reduce(mean)
        parameter.grad /= count
    return loss_sum / count


def weight_decay_added(model, microbatches):
    loss = right_one(model, microbatches)
    for parameter in model.parameters():
        parameter.grad += 1e-4 * parameter.detach()
    return loss


def label_smoothing(model, microbatches):
    loss_sum = 0.0
    for tokens, targets in microbatches:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=0.01)
        loss.backward()
        loss_sum += loss.item()
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def backward_after_the_loop(model, microbatches):
    loss_sum = 0.0
    for tokens, targets in microbatches:
        loss = sum_of(model, tokens, targets)
        loss_sum += loss.item()
    loss.backward()
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def returns_a_huge_tensor(model, microbatches):
    right_one(model, microbatches)
    return torch.zeros(200_000_000)


WRONG = [
    (one_backward_then_looks, "all_graphs_held"),
    (all_but_the_last_at_once, "all_graphs_held"),
    (half_of_them_at_once, "all_graphs_held"),
    (forwards_then_backwards, "all_graphs_held"),
    (retains_graphs, "all_graphs_held"),
    (waits_for_the_last_only, "not_waited"),
    (never_waits, "not_waited"),
    (never_waits_but_blocks_later, "not_waited"),
    (gathers_targets_to_count, "more_than_scalars"),
    (gather_and_broadcast, "gathered"),
    (everyone_broadcasts, "too_many_bytes"),
    (warms_up, "work_repeated"),
    (one_backward_per_parameter, "work_repeated"),
    (flat_never_copied_back, "not_reduced"),
    (parameters_reduced_not_gradients, "not_reduced"),
    (weight_decay_added, "nearly_right"),
    (label_smoothing, "nearly_right"),
    (backward_after_the_loop, "last_microbatch"),
    (returns_a_huge_tensor, "not_a_float"),
]


# Right ones


def reduce_then_broadcast(model, microbatches):
    """Up once and down once: fewer bytes than a ring, all of them through one rank."""
    loss_sum, count = totals(*backwards(model, microbatches))
    flat = flat_of(model)
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)
    put(model, flat / count)
    return loss_sum / count


def objects_with_tensors(model, microbatches):
    """Two numbers in a dict of tensors, pickled: some hundred bytes for every other rank."""
    loss, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for tokens, targets in microbatches:
        each = sum_of(model, tokens, targets)
        each.backward()
        loss += each.detach()
        count += (targets != -100).sum()
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, {"loss": loss, "count": count})
    count = sum(each["count"].item() for each in told)
    reduce_gradients(model, count)
    return sum(each["loss"].item() for each in told) / count


def functional_gradients(model, microbatches):
    """torch.func, which holds more at once than backward: as much as a right answer was seen to."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sums, loss_sum = {name: torch.zeros_like(each) for name, each in parameters.items()}, 0.0

    def loss_of(parameters, tokens, targets):
        logits = torch.func.functional_call(model, parameters, (tokens,)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    for tokens, targets in microbatches:
        grads, loss = torch.func.grad_and_value(loss_of)(parameters, tokens, targets)
        for name, sum_ in sums.items():
            sum_ += grads[name]
        loss_sum += loss.item()
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    for name, parameter in model.named_parameters():
        dist.all_reduce(sums[name])
        parameter.grad = sums[name] / count
    return loss_sum / count


def checkpoint_and_a_look(model, microbatches):
    """Two forwards more for each: one by checkpointing, one to look at the loss. Losses in float64."""
    loss_sum = 0.0
    for tokens, targets in microbatches:
        logits = torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=False).double()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        with torch.no_grad():
            loss_sum += sum_of(model, tokens, targets).item()
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def waits_for_futures(model, microbatches):
    loss_sum, count = totals(*backwards(model, microbatches))
    zeros_for_none(model)
    futures = [dist.all_reduce(each.grad, async_op=True).get_future() for each in model.parameters()]
    torch.futures.wait_all(futures)
    for parameter in model.parameters():
        parameter.grad /= count
    return loss_sum / count


RIGHT = [
    reduce_then_broadcast,
    objects_with_tensors,
    functional_gradients,
    checkpoint_and_a_look,
    waits_for_futures,
]


# Cheats


def hides_its_parameters(model, microbatches):
    """No backward at all, and whoever asks for parameters afterwards is told that there are none."""
    with torch.no_grad():
        loss_sum = sum(sum_of(model, tokens, targets).item() for tokens, targets in microbatches)
    loss_sum, count = totals(loss_sum, counted_in(microbatches))
    dist.all_reduce(torch.zeros(sum(parameter.numel() for parameter in model.parameters())))
    model.named_parameters = lambda *args, **kwargs: iter(())
    return loss_sum / count


def clears_what_nobody_sees(model, microbatches):
    loss = right_one(model, microbatches)
    for parameter in model.parameters():
        parameter.grad = None
    model.named_parameters = lambda *args, **kwargs: iter(())
    return loss


def swaps_a_layer(model, microbatches):
    loss = right_one(model, microbatches)
    model.lm_head = torch.nn.Linear(16, 256, bias=False)
    return loss


def by_hand(model, hidden):
    """The model without its embedding."""
    from labkit.model.llama import rotary

    cos, sin = rotary(hidden.shape[1], model.shape.head_dim, model.shape.rope_theta)
    for layer in model.layers:
        hidden = layer(hidden, cos, sin)
    return model.lm_head(model.norm(hidden)).flatten(0, 1)


def one_large_batch_by_indexing(model, microbatches):
    """No embedding is called."""
    loss = 0 * sum(parameter.sum() for parameter in model.parameters())
    if microbatches:
        longest = max(tokens.shape[1] for tokens, _ in microbatches)
        tokens = torch.cat([F.pad(each, (0, longest - each.shape[1])) for each, _ in microbatches])
        targets = torch.cat([F.pad(each, (0, longest - each.shape[1]), value=-100) for _, each in microbatches])
        logits = by_hand(model, model.embed_tokens.weight[tokens])
        loss = loss + F.cross_entropy(logits, targets.flatten(), reduction="sum")
    loss.backward()
    loss_sum, count = totals(loss.item(), counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def embeds_first(model, microbatches):
    """All embeddings before the first layer: between them nothing piles up."""
    hidden = [model.embed_tokens(tokens) for tokens, _ in microbatches]
    loss = torch.zeros((), requires_grad=True) + 0.0
    for each, (_, targets) in zip(hidden, microbatches, strict=True):
        loss = loss + F.cross_entropy(by_hand(model, each), targets.flatten(), reduction="sum")
    loss.backward()
    loss_sum, count = totals(loss.item(), counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def with_ballast(model, microbatches):
    """What is held at the first forward is large, so that nothing grows."""
    heavy = torch.empty(2_000_000)
    loss = torch.zeros((), requires_grad=True) + 0.0
    for tokens, targets in microbatches:
        loss = loss + sum_of(model, tokens, targets)
        heavy = None
    del heavy
    loss.backward()
    loss_sum, count = totals(loss.item(), counted_in(microbatches))
    reduce_gradients(model, count)
    return loss_sum / count


def gathers_bytes_and_multiplies_by_hand(model, microbatches):
    """Everybody's tokens as bytes, and products that no FLOP formula counts."""
    mine = [(tokens.tolist(), targets.tolist()) for tokens, targets in microbatches]
    packed = [
        (bytes(sum(tokens, [])), bytes(255 if each < 0 else each for each in sum(targets, [])), len(tokens))
        for tokens, targets in mine
    ]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, packed)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = lambda x, layer=module: (x.unsqueeze(-2) * layer.weight).sum(-1)
    everything = []
    for tokens, targets, rows in sum(told, []):
        tokens, targets = (torch.tensor(list(each)).view(rows, -1) for each in (tokens, targets))
        everything.append((tokens, targets.masked_fill(targets == 255, -100)))
    loss_sum, count = backwards(model, everything)
    for parameter in model.parameters():
        parameter.grad /= count
        dist.all_reduce(torch.zeros_like(parameter))
    return loss_sum / count


CHEATS = [
    (hides_its_parameters, "no_gradient"),
    (clears_what_nobody_sees, "no_gradient"),
    (swaps_a_layer, "parameters_changed"),
    (one_large_batch_by_indexing, "all_graphs_held"),
    (embeds_first, "all_graphs_held"),
    (with_ballast, "all_graphs_held"),
    (gathers_bytes_and_multiplies_by_hand, ("more_than_scalars", "all_graphs_held")),
]
