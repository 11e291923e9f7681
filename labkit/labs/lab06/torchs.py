"""torch's own tensor parallel on lab 06's model: `parallelize_module`, with and without `PrepareModuleInput`.

Without it each of q, k, v, gate and up makes a DTensor of x for itself, and each sums x's gradient for itself: five
all_reduces in a layer's backward where two are due. Embedding, head and loss are whole on every rank here. Left out:
torch's SequenceParallel.
"""

from __future__ import annotations

from typing import Any

import labkit.labs.lab06.training as training
from labkit.labs.lab06.training import Trained


def torchs(tp: int = 2, with_input: bool = True, steps: int = 10) -> Trained:
    """Plain SGD on lab 06's model, its layers parallelized by torch on `tp` ranks.

    with_input: x is made a DTensor once per region, by PrepareModuleInput. Raises ValueError for another tp than 2, for
    torch would cut the 2 KV heads in pieces; RankFailed as `launch`.
    """
    training.checked(tp, steps, "tp")
    if tp > training.SIZES["kv_heads"]:
        raise ValueError(f"parallelize_module cannot share a KV head: tp is at most 2 here, not {tp}; tp=2 would do")
    return training.launched(_in_rank, tp, steps, with_input)


def _plan(with_input: bool) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    if with_input:
        one, three = Replicate(), (Replicate(), None, None)
        plan["self_attn"] = PrepareModuleInput(input_layouts=three, desired_input_layouts=three)
        plan["mlp"] = PrepareModuleInput(input_layouts=one, desired_input_layouts=one)
    return plan


def _in_rank(steps: int, with_input: bool) -> tuple:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    import labkit.labs.lab06.standins as standins
    from labkit.model.llama import loss_of

    model = training.whole_model()
    for layer in model.layers:
        parallelize_module(layer, standins.mesh_of(None, model.norm.weight), _plan(with_input))
    kept: list[Any] = []
    model.embed_tokens.register_forward_hook(lambda module, given, out: kept.append(out))

    def forward(tokens: Any, targets: Any) -> tuple[Any, Any]:
        loss = loss_of(model(tokens), targets)
        return loss, kept.pop()

    losses, weights, gradients, record = training.steps_of(model, forward, steps)
    local = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in weights.items()}
    return losses, local, gradients, record


def layer_calls(trained: Trained) -> dict[str, int]:
    """all_reduces of x's size in one layer of a recorded step: {"forward": , "backward": }."""
    size = training.BATCH * training.LENGTH * training.SIZES["hidden"] * 4
    found = {}
    for phase in ("forward", "backward"):
        calls = [call for call in trained.calls if call.phase == phase and call.op == "all_reduce"]
        found[phase] = sum(call.num_bytes == size for call in calls) // training.SIZES["layers"]
    return found

