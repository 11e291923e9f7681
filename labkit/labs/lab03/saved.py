"""What autograd keeps for a backward, looked at while it keeps it: storage by storage, with who saved it and what for.

`saved_tensors_hooks` sees every tensor that a forward saves; the graph of the loss tells which of its nodes will use
it. Parameters are left out: they are held anyway. Also left out: tensors that a caller still holds by name, and what a
node in C++ keeps without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PRECISIONS = {4: "float32", 2: "bfloat16"}


@dataclass(frozen=True)
class Kept:
    """A storage that is kept. module: the innermost that saved it first; shape, dtype: of the tensor that it saved.

    used_by: nodes of the graph that need it in backward, with torch's own name of what it is to them.
    """

    module: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    used_by: tuple[str, ...]


def kept_by(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> tuple[Kept, ...]:
    """What autograd holds at the end of `forward()`, which gives a loss of `model`, in the order of saving."""
    import torch

    own = {p.untyped_storage()._cdata for p in model.parameters()}
    first: dict[int, tuple[str, Any]] = {}
    inside = [""]
    hooks = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own:
            first.setdefault(storage, (inside[-1], tensor))
        return tensor

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: inside.__delitem__(-1)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    uses = _uses(loss)
    return tuple(
        Kept(
            module,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.untyped_storage().nbytes(),
            tuple(dict.fromkeys(uses.get(storage, ()))),
        )
        for storage, (module, tensor) in first.items()
    )


def _uses(loss: torch.Tensor) -> dict[int, list[str]]:
    """Per storage, the nodes of the loss's graph that saved it, first those of the forward's begin."""
    found: dict[int, list[str]] = {}
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            value = getattr(node, name)
            for tensor in value if isinstance(value, tuple) else (value,):
                if hasattr(tensor, "untyped_storage"):
                    what = f"{_plain(node.name())} ({name.removeprefix('_saved_')})"
                    found.setdefault(tensor.untyped_storage()._cdata, []).insert(0, what)
    return found


def _plain(name: str) -> str:
    """MulBackward0 is Mul; ScaledDotProductFlashAttentionForCpuBackward0 is attention."""
    name = name.rstrip("0123456789").removesuffix("Backward")
    return "attention" if name.startswith("ScaledDotProduct") else name


def llama_keeps(shape: Any, batch: int, seq: int, element_bytes: int = 4, layers: int = 2) -> tuple[Kept, ...]:
    """`kept_by` of a forward and loss of a Llama with `layers` layers; shape: hidden, heads, kv_heads, ffn, vocab.

    element_bytes: 4 for fp32, 2 for bf16. ValueError for another width.
    """
    import torch

    from labkit.model import llama

    if element_bytes not in PRECISIONS:
        raise ValueError(f"element_bytes is 4 (fp32) or 2 (bf16), not {element_bytes!r}")
    sizes = {name: getattr(shape, name) for name in ("vocab", "hidden", "heads", "kv_heads", "ffn")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = llama.Llama(llama.Shape(layers=layers, **sizes)).to(getattr(torch, PRECISIONS[element_bytes]))
        tokens, targets = torch.randint(0, sizes["vocab"], (2, batch, seq)).unbind()
    return kept_by(lambda: llama.loss_of(model(tokens), targets), model)


def layer_bytes(shape: Any, batch: int, seq: int, element_bytes: int = 4) -> int:
    """What one more layer adds to the bytes that autograd holds at the end of forward: of 3 layers, less those of 1."""
    three, one = (
        sum(each.num_bytes for each in llama_keeps(shape, batch, seq, element_bytes, layers)) for layers in (3, 1)
    )
    return (three - one) // 2


def of_layer(kept: Sequence[Kept], number: int = 1) -> tuple[Kept, ...]:
    """Those that a layer saved."""
    return tuple(each for each in kept if each.module.startswith(f"layers.{number}"))


def table(kept: Sequence[Kept]) -> str:
    """A line a storage: bytes, shape, dtype, the module that saved it, which backward needs it; and the sum."""
    rows = [("bytes", "shape", "dtype", "saved in", "needed by the backward of")]
    for each in kept:
        module = each.module.split(".", 2)[-1] if each.module.startswith("layers.") else each.module or "(the model)"
        told = ", ".join(each.used_by) or "(freed with its node)"
        rows.append((f"{each.num_bytes:,}", " x ".join(map(str, each.shape)) or "1", each.dtype, module, told))
    rows.append((f"{sum(each.num_bytes for each in kept):,}", "", "", "", "together"))
    widths = [max(len(row[at]) for row in rows) for at in range(5)]
    lines = [f"{row[0]:>{widths[0]}}  " + "  ".join(f"{row[i]:{widths[i]}}" for i in range(1, 5)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
