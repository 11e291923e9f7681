"""The small Llama against transformers' LlamaForCausalLM with the same weights: logits, loss, gradients, training.

Configurations are made here, so nothing is fetched. Gradients are compared parameter by parameter, each in
proportion to its own largest element. In bf16 the two round at different places, so both are measured by their distance
to the same model in fp32.
"""

import pytest
import torch

from labkit.model.llama import Llama, Shape, loss_of

transformers = pytest.importorskip("transformers")

SHAPES = {
    "grouped": Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48),
    "every head its own": Shape(hidden=32, layers=2, heads=4, kv_heads=4, ffn=48),
    "one for all": Shape(hidden=64, layers=3, heads=8, kv_heads=1, ffn=100),
    "tied": Shape(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, tied=True),
    "far positions": Shape(hidden=48, layers=1, heads=2, kv_heads=1, ffn=64, rope_theta=500_000.0),
    "near positions": Shape(hidden=48, layers=2, heads=3, kv_heads=3, ffn=40, rope_theta=100.0),
    "coarse norm": Shape(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, norm_eps=1e-2),
    "fine norm": Shape(hidden=32, layers=2, heads=2, kv_heads=2, ffn=48, norm_eps=1e-8),
    "the default": Shape(),
}
LENGTHS = {"far positions": 200}


def config_of(shape):
    return transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        attn_implementation="sdpa",
        use_cache=False,
        max_position_embeddings=512,
    )


def both(shape, seed=0):
    """(ours, transformers') with the same weights, larger than at a start: small ones would hide differences."""
    torch.manual_seed(seed)
    ours, theirs = Llama(shape), transformers.LlamaForCausalLM(config_of(shape))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    missing = theirs.load_state_dict(
        {name if name.startswith("lm_head") else f"model.{name}": value for name, value in ours.state_dict().items()}
    )
    assert not missing.missing_keys and not missing.unexpected_keys
    return ours, theirs


def text(shape, length=24, rows=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab, (rows, length + 1), generator=generator)


def pairs(ours, theirs):
    """(name, ours, transformers') of every parameter."""
    named = dict(theirs.named_parameters())
    found = [
        (name, parameter, named.pop(name if name.startswith("lm_head") else f"model.{name}"))
        for name, parameter in ours.named_parameters()
    ]
    assert not named, "a parameter of transformers' has none here"
    return found


def close(got, expected, share):
    """Equal up to a share of the largest element."""
    torch.testing.assert_close(got, expected, rtol=0, atol=share * expected.abs().max().item())


@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_every_gradient_are_those_of_transformers(name):
    shape = SHAPES[name]
    ours, theirs = both(shape)
    tokens = text(shape, LENGTHS.get(name, 24))
    logits = ours(tokens[:, :-1])
    close(logits, theirs(tokens[:, :-1]).logits, 1e-5)
    loss, reference = loss_of(logits, tokens[:, 1:]), theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    loss.backward()
    reference.backward()
    compared = pairs(ours, theirs)
    assert len(compared) == 2 + 9 * shape.layers + (not shape.tied)
    for _, mine, other in compared:
        assert other.grad.abs().max() > 0
        close(mine.grad, other.grad, 1e-5)


@pytest.mark.parametrize("name", ["grouped", "every head its own", "tied"])
def test_a_model_that_differs_in_one_thing_would_be_told(name):
    shape = SHAPES[name]
    ours, theirs = both(shape)
    tokens = text(shape)
    reference = theirs(tokens).logits
    for changed in ({"rope_theta": 20_000.0}, {"norm_eps": 1e-2}):
        other = Llama(Shape(**{**vars(shape), **changed}))
        other.load_state_dict(ours.state_dict())
        with pytest.raises(AssertionError):
            close(other(tokens), reference, 1e-5)


@pytest.mark.parametrize("name", ["grouped", "tied", "one for all"])
def test_ten_steps_of_adamw_have_the_same_losses(name):
    shape = SHAPES[name]
    models = both(shape)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1) for model in models]
    losses = [[], []]
    for step in range(10):
        tokens = text(shape, seed=step)
        for model, optimizer, found in zip(models, optimizers, losses, strict=True):
            logits = model(tokens[:, :-1])
            loss = loss_of(getattr(logits, "logits", logits), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][-1], rel=1e-2)


@pytest.mark.parametrize("name", ["grouped", "every head its own", "the default"])
def test_in_bf16_both_are_equally_far_from_fp32(name):
    shape = SHAPES[name]
    ours, theirs = both(shape)
    tokens = text(shape)
    exact = theirs(tokens).logits.detach()
    for model in (ours, theirs):
        for parameter in model.parameters():  # not the buffers: transformers keeps its angles in fp32
            parameter.data = parameter.data.bfloat16()
    mine, other = ours(tokens), theirs(tokens).logits
    assert mine.dtype == other.dtype == torch.bfloat16
    mine_off, other_off = (((each.float() - exact).norm() / exact.norm()).item() for each in (mine, other))
    assert 0 < mine_off < 0.05 and mine_off == pytest.approx(other_off, rel=0.2)
    close(mine, other, 0.02)
    for logits in (mine, other):
        loss_of(logits[:, :-1], tokens[:, 1:]).backward()
    for _, parameter, reference in pairs(ours, theirs):
        assert parameter.grad.dtype == torch.bfloat16
        off = (parameter.grad - reference.grad).float().norm() / reference.grad.float().norm()
        assert off < 0.05, off
