"""Machines that this one is not, from the texts they print: eight linked GPUs, two without NVLink, containers."""

import pytest

from labkit.doctor import parse

DGX = """\
0, NVIDIA H100 80GB HBM3, 81559, 535.129.03
1, NVIDIA H100 80GB HBM3, 81559, 535.129.03
"""
JETSON = "0, Orin (nvgpu), [N/A], 540.4.0\n"

# nvidia-smi underlines the header of its own accord.
NVLINK = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t48-95,144-191\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
PCIE = """\
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     SYS     SYS     0-23    0
GPU1    NV4      X      SYS     SYS     0-23    0
GPU2    SYS     SYS      X      PHB     24-47   1
GPU3    SYS     SYS     PHB      X      24-47   1
"""


def test_gpus_have_a_name_bytes_and_a_driver():
    first, second = parse.gpus(DGX)
    assert first == parse.Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 2**20, "535.129.03")
    assert second.index == 1


def test_a_gpu_that_shares_the_hosts_memory_has_none_of_its_own():
    assert parse.gpus(JETSON) == (parse.Gpu(0, "Orin (nvgpu)", 0, "540.4.0"),)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed because ...\n"])
def test_no_gpus_are_read_from_a_complaint(text):
    assert parse.gpus(text) == ()
    assert parse.links(text) == {}


def test_links_leave_out_network_cards_and_count_a_pair_once():
    pairs = parse.links(NVLINK)
    assert set(pairs) == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    assert set(pairs.values()) == {"NV18"}
    assert parse.links_in_words(pairs) == "NV18 between all"


def test_links_of_unequal_pairs_are_counted_by_kind():
    pairs = parse.links(PCIE)
    assert pairs[0, 1] == "NV4" and pairs[2, 3] == "PHB" and pairs[1, 2] == "SYS"
    assert parse.links_in_words(pairs) == "SYS between 4 pairs, NV4 between 1 pair, PHB between 1 pair"


def test_available_memory_counts_kib():
    text = "MemTotal:       25120000 kB\nMemFree:         1 kB\nMemAvailable:   12000000 kB\n"
    assert parse.available_bytes(text) == 12000000 * 1024
    assert parse.available_bytes("MemTotal: 25120000 kB\n") is None


@pytest.mark.parametrize("text, num_bytes", [("max\n", None), ("2147483648\n", 2**31), ("", None)])
def test_cgroup_bytes(text, num_bytes):
    assert parse.cgroup_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "version, numbers",
    [("2.13.0+cpu", (2, 13, 0)), ("2.9", (2, 9)), ("2.11.0a0+git1", (2, 11, 0)), ("unknown", ())],
)
def test_versions_compare_as_numbers(version, numbers):
    assert parse.version_tuple(version) == numbers
