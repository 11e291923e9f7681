"""Steps of exercise 5.2 on a rank: weights and gradients are given, the answer updates; what it kept where is measured.

Left out: what is right (`disk`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import labkit.labs.lab05.asked as asked
from labkit.labs.lab00.attempts import Unusable

CALL = "DiskAdam(parameters, folder, lr=..., betas=..., eps=..., weight_decay=..., chunk=...)"
FULL_ELEMENTS, FREE_BYTES = 60_000, 64 * 1024


def update(
    cls: Callable, folder: str, weights: Sequence[Any], grads: Sequence[Sequence[Any]], options: dict, full: str = ""
) -> Any:
    """Runs in a rank: make `cls(parameters, folder, **options)`, then a step for each list of gradients.

    full: a folder in which to try it afterwards on a disk without room; "" for not.
    Gives weights (by step), kept (bytes of RAM at the end), peak (bytes of RAM within a step but the first, at most),
    left (numbers of parameters whose gradient is there after zero_grad()), files (path within the folder -> bytes) and
    private (bytes of files mapped for this process alone), full ((kind, message) of what it raised there) and again
    (the same of opening `folder` once more on such a disk); NotImplemented or an Unusable where there
    is nothing to judge.
    """
    import tracemalloc

    import torch

    found = asked.unfinished(cls, CALL, [], folder, **options)
    if found is not None:
        return found
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    tracemalloc.start()
    try:
        seen = _updated(cls, folder, parameters, grads, options)
    finally:
        tracemalloc.stop()
    if type(seen) is not dict:
        return seen
    if not full:
        return seen
    parameter = torch.nn.Parameter(torch.zeros(FULL_ELEMENTS))
    parameter.grad = torch.ones(FULL_ELEMENTS)
    again = _on_a_full_disk(cls, folder, parameters, options)
    return seen | {"again": again, "full": _on_a_full_disk(cls, full, [parameter], options)}


def _updated(cls: Callable, folder: str, parameters: list[Any], grads: Sequence[Any], options: dict) -> Any:
    """What `update` gives, but for "full", while tracemalloc is on."""
    from labkit.check import living

    before, peak, after = set(living.storages()), 0, []
    others = living.shared_bytes(folder)
    optimizer = cls(parameters, folder, **options)
    found = optimizer if optimizer is NotImplemented else asked.without(optimizer, cls)
    if found is not None:
        return found
    for number, of_step in enumerate(grads):
        out = _step(cls, optimizer, parameters, of_step)
        if type(out) is not int:
            return out
        peak = max(peak, out if number else 0)  # the first may import what it needs
        after.append([each.detach().clone() for each in parameters])
    left = [number for number, each in enumerate(parameters) if each.grad is not None and each.grad.any()]
    ours = {tensor.untyped_storage()._cdata for step in after for tensor in step}
    ours |= {each.grad.untyped_storage()._cdata for each in parameters if each.grad is not None}
    kept = _kept(folder, before | ours) + max(0, living.shared_bytes(folder) - others)
    private = sum(end - begin for begin, end in living.mapped(folder, private=True))
    return {"weights": after, "kept": kept, "peak": peak, "left": left, "files": files(folder), "private": private}


def _step(cls: Callable, optimizer: Any, parameters: list[Any], grads: Sequence[Any]) -> int | Unusable:
    """Peak of RAM in bytes, or why it cannot be judged."""
    from labkit.check.ram import Peak

    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.clone()
    with Peak() as peak:
        out = optimizer.step()
    found = asked.stub_result(cls, "step", out) or asked.stub_result(cls, "zero_grad", optimizer.zero_grad())
    return found or peak.num_bytes


def _kept(folder: str, ours: set[int]) -> int:
    """Bytes of RAM that were not there before: tensors that no file of the folder backs, and other large objects."""
    from labkit.check import living, ram

    ranges = living.mapped(folder)
    num_bytes = 0
    for storage, tensor in living.storages().items():
        at = living.address(tensor)
        if storage not in ours and not any(begin <= at < end for begin, end in ranges):
            num_bytes += tensor.untyped_storage().nbytes()
    return num_bytes + ram.large_objects()


def grown(cls: Callable, folder: str, elements: int, chunk: int) -> int:
    """Runs in a rank that nobody watches: bytes that this process took for itself, by the kernel, from before
    `cls` was made until after three updates of so many parameters; -1 where the system does not tell.
    """
    import torch

    from labkit.check.ram import resident

    parameter = torch.nn.Parameter(torch.ones(elements // 1024, 1024))
    weights, grad = parameter.data, torch.ones(elements // 1024, 1024)
    before = resident()
    optimizer = cls([parameter], folder, chunk=chunk)
    for _ in range(3):
        parameter.grad = grad
        optimizer.step()
    after = resident()
    del weights, grad  # until here, so that an answer that lets go of them has no more room
    return -1 if before is None or after is None else after["RssAnon"] - before["RssAnon"]


def files(folder: str) -> dict[str, int]:
    """Path within the folder -> size of its files."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            found[os.path.relpath(path, folder)] = os.path.getsize(path)
    return found


def _on_a_full_disk(cls: Callable, folder: str, parameters: list[Any], options: dict) -> tuple[str, str]:
    from labkit.check.ram import full_disk

    with full_disk(FREE_BYTES):
        try:
            cls(parameters, folder, **options)
        except OSError as error:
            return "OSError", str(error)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""
