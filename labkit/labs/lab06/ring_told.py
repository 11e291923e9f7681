"""What exercise 6.6 is due to give, and what known mistakes would: serial attention over chunks that ranks hold.

Left out: messages and work (`ring`).
"""

from __future__ import annotations

import math
from typing import Any

import labkit.labs.lab06.told as told
from labkit.labs.lab02.models import one_thread
from labkit.labs.lab06.functions import Case
from labkit.labs.lab06.told import Due


def positions(rank: int, n: int, length: int) -> Any:
    """The positions of a rank's two chunks, in the order in which it has them. length: of the whole sequence."""
    import torch

    chunks = torch.arange(length).chunk(2 * n)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def own(whole: Any, rank: int, n: int) -> Any:
    """A rank's part of a tensor (b, heads, s, d)."""
    return whole[:, :, positions(rank, n, whole.shape[2])].contiguous()


def _put_together(parts: list[Any]) -> Any:
    """The whole tensor of the parts of a group, in rank order."""
    import torch

    n, length = len(parts), len(parts) * parts[0].shape[2]
    order = torch.cat([positions(rank, n, length) for rank in range(n)])
    whole = torch.empty_like(torch.cat(parts, 2))
    whole[:, :, order] = torch.cat(parts, 2)
    return whole


def _attend(q: Any, k: Any, v: Any, allowed: Any, scale: float) -> Any:
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -math.inf)
    return scores.softmax(-1) @ v


def _gradients(q: Any, k: Any, v: Any, gradient: Any, scale: float) -> list[Any]:
    import torch

    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    length = q.shape[2]
    out = _attend(*leaves, torch.ones(length, length, dtype=torch.bool).tril(), scale)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def calls(case: Case, number: int) -> Due:
    """Due of one call: output, gradients of q ("input gradient"), k and v."""
    n, world = case.t, case.world
    names = ("output", "input gradient", "input gradient 1", "input gradient 2")
    values: dict[str, list[Any]] = {name: [] for name in names}
    known: dict[str, dict[str, list[Any]]] = {name: {} for name in names}
    with one_thread():
        for begin in range(0, world, n):
            ask = case.asks[number][begin : begin + n]
            q, k, v = (_put_together([inputs[at] for inputs, _ in ask]) for at in range(3))
            gradient = _put_together([each for _, each in ask])
            scale = q.shape[-1] ** -0.5
            full = _gradients(q, k, v, gradient, scale)
            without_delta = _without_delta(q, k, v, gradient, scale)
            for rank in range(n):
                for name, whole in zip(names, full, strict=True):
                    values[name].append(own(whole, rank, n))
                for cause, value in _outputs(q, k, v, scale, rank, n).items():
                    known["output"].setdefault(cause, []).append(value)
                for name, value in zip(names[1:3], without_delta, strict=True):
                    known[name].setdefault("delta_missing", []).append(own(value, rank, n))
                for name, whole in zip(names[1:3], full[1:3], strict=True):
                    known[name].setdefault("not_scaled_back", []).append(own(whole / scale, rank, n))
                of_rank = _own_part(q, k, v, gradient, scale, rank, n)
                for at in (1, 2):
                    of = known[names[at + 1]]
                    of.setdefault("kv_gradients_swapped", []).append(own(full[4 - at], rank, n))
                    of.setdefault("kv_not_returned", []).append(own(of_rank[at + 1], rank, n))
                    of.setdefault("kv_not_home", []).append(own(full[at + 1], (rank + 1) % n, n))
                    of.setdefault("kv_not_home behind", []).append(own(full[at + 1], (rank - 1) % n, n))
    mistakes = {}
    for name in names:
        pairs = [(cause.split(" ")[0], each) for cause, each in known[name].items()]
        mistakes[name] = told.known(_SENTENCES, *pairs)
    words = {name: f"gradient of {of}" for name, of in zip(names[1:], "qkv", strict=True)}
    return Due(values, mistakes, words=words)


def _without_delta(q: Any, k: Any, v: Any, gradient: Any, scale: float) -> tuple[Any, Any]:
    """Gradients of q and k where nothing comes off the scores' gradients before they are multiplied by softmax."""
    import torch

    length = q.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    softmax = (q @ k.mT * scale).masked_fill(~allowed, -math.inf).softmax(-1)
    of_scores = softmax * (gradient @ v.mT) * scale
    return of_scores @ k, of_scores.mT @ q


def _own_part(q: Any, k: Any, v: Any, gradient: Any, scale: float, rank: int, n: int) -> list[Any]:
    """Gradients that a rank's own queries give."""
    import torch

    only = torch.zeros_like(gradient)
    mine = positions(rank, n, q.shape[2])
    only[:, :, mine] = gradient[:, :, mine]
    return _gradients(q, k, v, only, scale)


def _outputs(q: Any, k: Any, v: Any, scale: float, rank: int, n: int) -> dict[str, Any]:
    """What known mistakes of forward give on a rank."""
    import torch

    length = q.shape[2]
    mine = positions(rank, n, length)
    queries, local = q[:, :, mine], torch.arange(len(mine))
    hops = [positions((rank - hop) % n, n, length) for hop in range(n)]
    keys = torch.cat(hops)
    causal = mine[:, None] >= keys
    by_local = local[:, None] >= local.repeat(n)
    in_row = torch.cat([(rank - hop) % n * len(mine) + local for hop in range(n)])
    contiguous = (rank * len(mine) + local)[:, None] >= in_row
    first_only = causal.clone()
    first_only[:, len(mine) :] = True
    without_last = causal.clone()
    without_last[:, -len(mine) :] = False

    def attended(allowed: Any, by: float = scale) -> Any:
        return _attend(queries, k[:, :, keys], v[:, :, keys], allowed, by)

    own_alone = causal[:, : len(mine)]
    chunks = [chunk for hop in hops for chunk in hop.chunk(2)]
    return {
        "local_positions": attended(by_local),
        "local_positions contiguous": attended(contiguous),
        "no_mask": attended(torch.ones_like(causal)),
        "others_unmasked": attended(first_only),
        "own_only": _attend(queries, k[:, :, mine], v[:, :, mine], own_alone, scale),
        "hop_missing": attended(without_last),
        "not_scaled": attended(causal, 1.0),
        "k_v_swapped": _attend(queries, v[:, :, keys], k[:, :, keys], causal, scale),
        "not_rescaled": _not_rescaled(queries, k, v, mine, hops, scale),
        "not_rescaled chunks": _not_rescaled(queries, k, v, mine, chunks, scale),
        "not_rescaled values": _not_rescaled(queries, k, v, mine, hops, scale, "values"),
        "not_rescaled chunks values": _not_rescaled(queries, k, v, mine, chunks, scale, "values"),
        "softmaxes_mixed": _mixed(queries, k, v, mine, hops, scale, n),
        "softmaxes_mixed added": _mixed(queries, k, v, mine, hops, scale, 1),
    }


def _not_rescaled(queries: Any, k: Any, v: Any, mine: Any, hops: list[Any], scale: float, what: str = "both") -> Any:
    """Online softmax whose sums stay as they are when the maximum rises. what: "values" alone, or "both" sums."""
    import torch

    top = torch.full((*queries.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(queries)
    for hop in hops:
        scores = queries @ k[:, :, hop].transpose(-1, -2) * scale
        scores = scores.masked_fill(mine[:, None] < hop, -math.inf)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -math.inf, 0.0)
        part = (scores - safe).exp()
        if what == "values":
            total = total * (top - safe).exp()
        total, out, top = total + part.sum(-1, keepdim=True), out + part @ v[:, :, hop], new
    return out / total


def _mixed(queries: Any, k: Any, v: Any, mine: Any, hops: list[Any], scale: float, n: int) -> Any:
    """Each hop's softmax by itself, added up and divided by n."""
    import torch

    out = torch.zeros_like(queries)
    for hop in hops:
        allowed = mine[:, None] >= hop
        out = out + torch.nan_to_num(_attend(queries, k[:, :, hop], v[:, :, hop], allowed, scale))
    return out / n


_SENTENCES = {
    "local_positions": "the mask is made of places within ranks: rank i has chunks i and 2n-1-i of the sequence, and "
    "keys that came have the positions of their source.",
    "no_mask": "queries see keys that come after them: the causal mask is missing.",
    "others_unmasked": "other ranks' keys are not masked, though some come after the query.",
    "own_only": "queries see the rank's own keys alone: the others' come round the ring.",
    "hop_missing": "the keys of the last hop are not used: n-1 hops and the own ones make n.",
    "not_scaled": "scores are not divided by the square root of head_dim.",
    "k_v_swapped": "keys are taken for values and values for keys.",
    "not_rescaled": "when the maximum rises, what was summed so far must be multiplied by exp(old - new).",
    "softmaxes_mixed": "softmaxes of single blocks are added up: keep maximum and sum, and divide once at the end.",
    "delta_missing": "softmax's backward is P * (dP - D), D each row's sum of gradient times output: D is missing.",
    "not_scaled_back": "backward multiplies by the scale that forward gave the scores: here it does not.",
    "kv_gradients_swapped": "k has the gradient of v, and v that of k: backward gives them in the order q, k, v.",
    "kv_not_returned": "k and v get the gradient of the rank's own queries alone: others' parts travel with them home.",
    "kv_not_home": "gradients of k and v stay where the ring left them: one more hop brings them home.",
}
