"""Numbers of lab 04's pictures and tables: Table 1, claims, bars, sharding over nodes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.cost import claims, sharding
from labkit.cost.layout import Layout
from labkit.labs.lab04 import engines, pictures
from tests.house.source import ROOT

PUBLISHED = json.loads((Path(ROOT) / "tests" / "data" / "published_values.json").read_text())


def step(name, parameters, gradients, optimizer, buckets, sent):
    """A recorded step by hand, of 100 parameters."""
    states = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    return SimpleNamespace(
        name=name,
        parameters=100,
        states=lambda: states,
        most=lambda kind: buckets,
        sent_elements=sent,
        moved={"all_reduce": (2, 4000), "barrier": (1, 0)},
    )


def test_bars_are_bytes_per_parameter():
    names, kept = pictures.bars([step("one", 400, 200, 800, 50, 1.5), step("two", 100, 0, 200, 0, 2.25)])
    assert names == ["one", "two"]
    assert kept == {
        "parameters": [4, 1], "gradients": [2, 0], "optimizer": [8, 2], "buffers": [0.5, 0],
    }  # fmt: skip


def test_a_line_of_the_table_has_states_traffic_in_rings_and_calls_that_carry_something():
    line = pictures.step_table([step("one", 400, 200, 800, 50, 1.5)], ranks=4).splitlines()[-1]
    assert line.split()[:5] == ["one", "4.00", "2.00", "8.00", "2.000"]
    assert line.endswith("2 all_reduce")


@pytest.mark.parametrize(
    ("stage", "ranks", "precision", "due"),
    [(0, 4, "fp32", (4, 4, 8)), (1, 4, "fp32", (4, 4, 2)), (2, 8, "bf16", (2, 0.25, 1.5)), (3, 2, "bf16", (1, 1, 6))],
)
def test_the_formula_is_zeros_own(stage, ranks, precision, due):
    assert tuple(pictures.by_formula(stage, ranks, precision).values()) == pytest.approx(due)


def test_table_1_is_the_papers():
    """arXiv:1910.02054, Table 1, typed from the paper; it rounds 41.25 up where Python rounds to even."""
    paper = {
        1: "120 120 120 2048 2048 2048 16000 16000 16000",
        4: "52.5 41.3 30 896 704 512 7000 5500 4000",
        16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
        64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
        256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
        1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
    }
    unit, _, models, stages, _, *lines = pictures.table_1().splitlines()
    assert unit == "GB on each device" and stages.split() == ["ranks", *"123123123"]
    assert [models[match.start() :][:4] for match in re.finditer(r"\S+,", models)] == ["7.5B", "128B", "1000"]
    assert [match.start() for match in re.finditer(r"\S+,", models)] == [m.start() for m in re.finditer("1", stages)]
    rows = [line.split() for line in lines]
    assert [int(row[0]) for row in rows] == list(paper)
    for row, due in zip(rows, paper.values(), strict=True):
        for got, told in zip(map(float, row[1:]), map(float, due.split()), strict=True):
            # The paper cuts where it does not round.
            assert got == pytest.approx(told, abs=max(0.0051, 0.0005 * told, 10 ** -len(f"{told:g}".partition(".")[2])))


def test_the_claims_table_has_every_verdict_with_its_figure():
    lines = pictures.claims_table(8, "H100", "bf16").splitlines()
    verdicts = claims.verdicts(8, "H100", "bf16")
    assert len(lines) == 2 + len(verdicts)
    for line, verdict in zip(lines[2:], verdicts, strict=True):
        assert line == f"| {verdict.claim} | {verdict.holds} | {verdict.why} |"
    told = {verdict.claim: verdict for verdict in verdicts}
    assert told["ZeRO-1 saves up to 4 times"].figure == pytest.approx(16 / (4 + 12 / 8))
    assert told["ZeRO-2 saves up to 8 times"].figure == pytest.approx(16 / (2 + 14 / 8))
    assert told["ZeRO-3 sends half as much again as ZeRO-2"].holds == "holds"
    assert told["ZeRO-1 is for 100B"].holds == told["ZeRO-2 is for 500B"].holds == "does not hold"
    assert told["recomputation is part of ZeRO-2"].holds == "does not hold"


def test_what_leaves_a_node_is_as_the_cost_model_counts_it_with_many_nodes():
    ways = {way.name: way for way in pictures.spreads(nodes=4096, per_node=8)}
    count = 10**6
    plain = Layout(dp=8, zero=3, precision="bf16")
    due = sum(sharding.crossing(plain, count).values()) / count
    assert ways["ZeRO-3"].leaving == pytest.approx(due, rel=1e-3)
    plus = Layout(dp=16, zero=3, precision="bf16", per_node=8, zeropp="all")
    due = sum(sharding.crossing(plus, count).values()) / count
    assert ways["ZeRO++"].leaving == pytest.approx(due, rel=1e-3)
    assert ways["ZeRO++"].leaving / ways["ZeRO-3"].leaving == pytest.approx(0.25, rel=1e-3)  # ZeRO++, Table 1


def test_hybrid_sharding_sends_a_nodes_gradients_once_around_the_nodes():
    ways = {way.name: way for way in pictures.spreads(nodes=2, per_node=8)}
    assert ways["HSDP"].leaving == pytest.approx(2 * 2 * (2 - 1) / 2)  # 2 bytes, an all_reduce of 2 nodes
    assert sum(ways["HSDP"].kept.values()) == pytest.approx(16 / 8)
    assert sum(ways["ZeRO-3"].kept.values()) == pytest.approx(16 / 16)
    assert ways["ZeRO++"].kept["buffers"] == pytest.approx(2 / 8)
    assert ways["DDP"].leaving == pytest.approx(2 * 2 * 15 / 16)
    assert all(way.leaving == 0 for way in pictures.spreads(nodes=1))


def test_a_configuration_has_small_buckets_unless_it_says_otherwise():
    plain = engines.config(2)["zero_optimization"]
    assert plain["stage"] == 2 and plain["reduce_bucket_size"] == engines.BUCKET
    assert engines.config(2, reduce_bucket_size=7)["zero_optimization"]["reduce_bucket_size"] == 7
    assert engines.config(3)["zero_optimization"]["stage3_max_live_parameters"] == 0
    assert "stage3_max_live_parameters" not in plain
