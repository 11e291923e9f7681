"""FLOPs of training: counted product by product, and by the formulas that papers quote, under their names.

A product of (m, k) and (k, n) is 2 m k n FLOPs; the backward is two such products for each of the forward's. Model
FLOPs are those that the model needs; hardware FLOPs add what recomputation repeats (Korthikanti et al.,
arXiv:2205.05198, section 6.3). Left out: everything that is no matrix product (norms, softmax, activations, rotation).
"""

from __future__ import annotations

from labkit.cost.shapes import Shape, mlp_parameters

DAY_S = 86400


def layer_forward(shape: Shape, tokens: int, seq: int, causal: bool = False) -> int:
    """One layer's forward on `tokens` tokens in sequences of seq: attention, and the MLPs that each token sees.

    causal: count only scores that are not masked, about half (flash attention skips the others).
    """
    matrices = shape.hidden * (2 * shape.query_width + 2 * shape.kv_width)
    biases = (2 if shape.gated else 1) * shape.ffn + shape.hidden if shape.biases or shape.mlp_biases else 0
    matrices += (mlp_parameters(shape) - biases) * (shape.active_experts or 1) + shape.experts * shape.hidden
    return 2 * tokens * matrices + core_forward(shape, tokens, seq, causal)


def core_forward(shape: Shape, tokens: int, seq: int, causal: bool = False) -> int:
    """Scores and weighting: 4 s a d per token, half of it (s + 1 instead of 2 s keys) where masked ones are skipped."""
    return 2 * tokens * (seq + 1 if causal else 2 * seq) * shape.query_width


def head_forward(shape: Shape, tokens: int) -> int:
    return 2 * tokens * shape.hidden * shape.vocab


def forward(shape: Shape, tokens: int, seq: int, causal: bool = False) -> int:
    """The whole forward: embeddings are looked up, not multiplied."""
    return shape.layers * layer_forward(shape, tokens, seq, causal) + head_forward(shape, tokens)


def model_flops(shape: Shape, tokens: int, seq: int, causal: bool = False) -> int:
    """Forward and backward, nothing twice."""
    return 3 * forward(shape, tokens, seq, causal)


def recomputed(shape: Shape, tokens: int, seq: int, recompute: str = "none", causal: bool = False) -> int:
    """What recomputation adds: "full" every layer's forward, "selective" that of the attention core.

    "second": torchtitan's own selective way, the products whose outputs `moments.layer_kept` has not: key, output, up.
    """
    if recompute == "none":
        return 0
    if recompute == "second":
        return shape.layers * 2 * tokens * shape.hidden * (shape.kv_width + shape.query_width + shape.ffn)
    if recompute not in ("selective", "full"):
        raise ValueError(f"recompute must be none, selective or full, not {recompute!r}")
    again = core_forward if recompute == "selective" else layer_forward
    return shape.layers * again(shape, tokens, seq, causal)


def hardware_flops(shape: Shape, tokens: int, seq: int, recompute: str = "none", causal: bool = False) -> int:
    """Model FLOPs and what recomputation repeats."""
    return model_flops(shape, tokens, seq, causal) + recomputed(shape, tokens, seq, recompute, causal)


def palm_per_token(num_parameters: float, layers: int, hidden: int, seq: int) -> float:
    """6 N + 12 L h s (PaLM, arXiv:2204.02311, appendix B; torchtitan's MFU): every score counted, N with embeddings."""
    return 6 * num_parameters + 12 * layers * hidden * seq


def nemo_per_token(num_parameters: float, embedding: float, layers: int, hidden: int, seq: int) -> float:
    """6 (N - input embedding) + 6 L h s (NVIDIA's Megatron Bridge performance summary): masked scores not counted."""
    return 6 * (num_parameters - embedding) + 6 * layers * hidden * seq


def narayanan_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int) -> float:
    """96 B s L h^2 (1 + s / 6h + V / 16 L h) (arXiv:2104.04473, section 3.3.2, equation 3): with full recomputation."""
    return 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def korthikanti_flops(batch: int, seq: int, layers: int, hidden: int, vocab: int, recompute: str = "none") -> float:
    """72 B s L h^2 (1 + s / 6h + V / 12 L h) (arXiv:2205.05198, appendix A).

    recompute "selective": the appendix's hardware FLOPs, 72 B s L h^2 (1 + s / 3h + V / 12 L h). They count for the
    recomputed attention core as much as its forward and backward, s / 6h; one forward of it is s / 18h, which is what
    `hardware_flops` counts. "full": one more forward of the layers.
    """
    shares = {"none": seq / (6 * hidden), "selective": seq / (3 * hidden)}
    shares["full"] = shares["none"] + (1 + shares["none"]) / 3
    if recompute not in shares:
        raise ValueError(f"recompute must be none, selective or full, not {recompute!r}")
    return 72 * batch * seq * layers * hidden**2 * (1 + shares[recompute] + vocab / (12 * layers * hidden))


def utilization(flops: float, time_s: float, devices: int, peak: float) -> float:
    """Share of the peak that was reached: MFU of model FLOPs, HFU of hardware FLOPs."""
    if not (time_s > 0 and devices > 0 and peak > 0):
        raise ValueError(f"time_s, devices and peak must be more than 0, not {time_s}, {devices}, {peak}")
    return flops / (time_s * devices * peak)


def training_days(tokens: float, num_parameters: float, devices: int, flops_per_s: float) -> float:
    """8 T P / (n X) (arXiv:2104.04473, section 5.1, equation 4): with full recomputation, attention left out."""
    return 8 * tokens * num_parameters / (devices * flops_per_s) / DAY_S
