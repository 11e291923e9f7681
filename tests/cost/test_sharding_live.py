"""Hybrid sharding under torch's own FSDP2 on four live ranks: each rank sends what the formula says, axis by axis."""

import warnings

import pytest
import torch
from torch import nn

from labkit.cost import sharding
from labkit.cost.layout import Layout
from labkit.ranks.launch import launch
from labkit.record.trace import Trace

SIZES = (64, 128, 64)
RANKS = 4


def trained(within, steps):
    """Of one step after the first ones: {(op, ranks of the group): bytes sent}, bytes of a rank's own parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(SIZES, SIZES[1:], strict=False)))
    shape = (RANKS // within, within) if within < RANKS else (RANKS,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        with Trace() as t:
            model(torch.randn(8, SIZES[0])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = {}
    for each in t.record.collectives:
        key = each.op, len(each.ranks)
        sent[key] = sent.get(key, 0) + each.sent_bytes
    return sent, sum(p.to_local().numel() for p in model.parameters())


@pytest.mark.parametrize("within", [2, 4])
def test_fsdp2_sends_what_hybrid_sharding_is_said_to_send(within):
    count = sum(a * b for a, b in zip(SIZES, SIZES[1:], strict=False))
    layout = Layout(dp=RANKS, zero=3, shard_within=within, precision="fp32")
    want = sharding.hybrid(layout, count, within)
    for sent, own in launch(trained, RANKS, within, 2):
        assert own == count // within
        assert sent["all_gather", within] == want["shard"]["all_gather"]
        assert sent["reduce_scatter", within] == want["shard"]["reduce_scatter"]
        assert sent.get(("all_reduce", RANKS // within), 0) == want["dp"]["all_reduce"]
        assert len(sent) == (3 if within < RANKS else 2)
