"""The small Llama: its parts against torch and against the papers' definitions. Whole: `test_transformers`."""

import pytest
import torch
import torch.nn.functional as F

from labkit.model.llama import MLP, Attention, Llama, RMSNorm, Shape, loss_of, rotary, rotate
from labkit.model.text import batches

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)


def test_rms_norm_is_torchs():
    norm = RMSNorm(32, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))


def test_rotation_keeps_lengths_and_turns_by_the_distance_alone():
    cos, sin = rotary(20, 8, 10000.0)
    q, k = torch.randn(1, 1, 1, 8).expand(1, 1, 20, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 20, 8)
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores.diagonal(3), scores[3 - 3, 3].expand(17))
    assert not torch.allclose(scores.diagonal(3)[0], scores.diagonal(4)[0])


def test_rotation_turns_pairs_of_halves_by_their_own_frequency():
    cos, sin = rotary(3, 4, 100.0)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    turned = rotate(x, cos, sin)[0, 0, 2]
    torch.testing.assert_close(turned, torch.tensor([torch.tensor(2.0).cos(), 0.0, torch.tensor(2.0).sin(), 0.0]))


def test_grouped_heads_are_full_attention_with_repeated_keys_and_values():
    attention = Attention(SHAPE)
    full = Attention(Shape(hidden=32, layers=2, heads=4, kv_heads=4, ffn=48))
    full.load_state_dict(attention.state_dict() | {
        name: attention.state_dict()[name].view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
        for name in ("k_proj.weight", "v_proj.weight")
    })  # fmt: skip
    x, angles = torch.randn(2, 6, 32), rotary(6, 8, 10000.0)
    torch.testing.assert_close(attention(x, *angles), full(x, *angles))


def test_the_mlp_is_swiglu():
    mlp, x = MLP(SHAPE), torch.randn(2, 32)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.down_proj.weight.T)


def test_no_token_sees_a_later_one():
    model, tokens = Llama(SHAPE), torch.randint(256, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_the_number_of_parameters_is_the_shapes():
    h, f, kv = 32, 48, 16
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert sum(p.numel() for p in Llama(SHAPE).parameters()) == 2 * 256 * h + 2 * layer + h
    tied = Llama(Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, tied=True))
    assert sum(p.numel() for p in tied.parameters()) == 256 * h + 2 * layer + h


def test_the_loss_falls_on_real_text():
    torch.manual_seed(0)
    model = Llama(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in batches(8, 32, seed=1, steps=40):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # ln 256: it knows nothing
    assert sum(losses[-5:]) / 5 < 3.6


@pytest.mark.parametrize("wrong", [{"hidden": 30}, {"kv_heads": 3}, {"hidden": 12}])
def test_heads_that_do_not_divide_are_refused(wrong):
    with pytest.raises(ValueError, match="heads"):
        Shape(**{"hidden": 32, "heads": 4, "kv_heads": 2, **wrong})
