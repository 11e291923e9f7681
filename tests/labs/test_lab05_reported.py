"""Problems with offload that people reported: what the lab's cost arithmetic and its decisions say of them.

The reports with their sources are in tests/data/reported_problems.json. Left out: absolute times, for kernels, host
and batch of the reports are not known.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.cost import hardware, states
from labkit.labs import lab05
from labkit.labs.lab05 import configurations, pays, stations
from tests.problems import problem

FALCON = 7_217_189_760  # parameters of Falcon-7B


def small(**changes):
    """A model that fits one GPU many times over."""
    return replace(configurations.six()[0], **changes)


def test_the_more_is_offloaded_the_slower_the_step():
    """Falcon-7B on 8 A100-40: FSDP, ZeRO-3 with all offloaded, and what lies between."""
    measured = problem("B13")["input"]["measured"]
    card, gpus = hardware.device("A100-40"), 8
    wires = {"hbm": card.memory_bandwidth, "pcie": card.host.bandwidth}
    wires |= {"dram": configurations.DRAM["8 x DDR4-3200"] / gpus, "nvme": 1e9}
    part, compute = FALCON / gpus, (1.0, 2.0)
    on_device = stations.step_time_s(part, 32, *compute, wires, "device", False)
    on_host = stations.step_time_s(part, 32, *compute, wires, "host", False)
    # All parameters come from the host for forward and again for backward, a GPU its own part of each.
    fetched = on_host + 2 * stations.UP * part / wires["pcie"]
    assert on_device < on_host < fetched
    assert measured["z3"][1] < measured["z2_off"][1] < measured["z3_offall"][1]
    memory = [states.state_bytes(FALCON, states.per_parameter("deepspeed", stage=z), z, gpus, off).total for z, off in
              ((3, "parameters"), (2, "optimizer"))]  # fmt: skip
    assert memory[0] < memory[1] and measured["z3_offall"][0] < measured["z2_off"][0]


def test_zero_2_without_offload_leaves_too_little_for_activations():
    assert problem("B13")["input"]["measured"]["z2"] == "OOM"
    held = states.state_bytes(FALCON, states.per_parameter("deepspeed", stage=2), 2, 8).total
    assert abs(held / 30.6e9 - 1) < 0.01
    assert hardware.device("A100-40").memory_bytes - held < 13e9


def test_a_model_that_fits_is_told_to_stay_on_the_device():
    config = problem("F02")["input"]["config"]["zero_optimization"]
    assert "offload_optimizer" in config
    assert pays.decide(small()) == "device"
    slow = small(bandwidth=small().bandwidth | {"dram": 20e9, "pcie": 8e9}, forward_s=0.001, backward_s=0.002)
    times = {way: row[3] for way, row in pays.ways(slow).items()}
    assert times["host"] > times["device"]  # as was reported
    assert pays.decide(slow) == "device"


def test_a_model_that_fits_on_each_of_eight_gpus_needs_nothing_either():
    """2.9 times as fast after DeepSpeed was left out, on the same GPUs; six times with twice as many."""
    assert "2.90x" in problem("F01")["input"]["measured"]
    assert pays.decide(small(gpus=8)) == "device"
    assert lab05.six()[0].name == "gpt2 on one T4"
