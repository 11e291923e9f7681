"""Hardware: dense figures only, checked against what the chips are made of; every figure with its source; names."""

import dataclasses
import pickle
import re

import pytest

from labkit.cost import hardware
from labkit.cost.devices import DEVICES
from labkit.cost.links import LINKS
from labkit.cost.nodes import NODES
from labkit.cost.parts import GIB, Cluster, Device, Link, Node, spelled

# Multiprocessors; 16-bit fused multiply-adds per multiprocessor and clock (dense, summed in 32 bits) and the clock in
# GHz behind the datasheet's figure; the same in 32 bits; width of the memory bus in bits and Gb/s of each. From
# NVIDIA's whitepapers of Volta, Turing, Ampere, Hopper and Ada; Blackwell's 32-bit units are not published.
CHIPS = {
    "T4": (40, 512, 1.59, 64, 1.59, 256, 10),
    "V100-16": (80, 512, 1.53, 64, 1.53, 4096, 1.75),
    "V100-32": (80, 512, 1.53, 64, 1.53, 4096, 1.75),
    "A100-40": (108, 1024, 1.41, 64, 1.41, 5120, 2.43),
    "A100-80": (108, 1024, 1.41, 64, 1.41, 5120, 3.186),
    "L4": (58, 512, 2.04, 128, 2.04, 192, 12.5),
    "L40S": (142, 512, 2.49, 128, 2.52, 384, 18),
    "RTX 4090": (128, 256, 2.52, 128, 2.52, 384, 21),
    "H100": (132, 2048, 1.83, 128, 1.98, 5120, 5.23),
    "H100 PCIe": (114, 2048, 1.62, 128, 1.755, 5120, 3.2),
    "H200": (132, 2048, 1.83, 128, 1.98, 6144, 6.25),
    "B200": (148, 4096, 1.85, None, None, 8192, 8),
    "GB200": (152, 4096, 2.0, None, None, 8192, 8),
}
# 16-bit TFLOP/s "with sparsity", as brochures print them.
SPARSE = {
    "A100-40": 624,
    "A100-80": 624,
    "L4": 242,
    "L40S": 733,
    "RTX 4090": 330.4,
    "H100": 1979,
    "H100 PCIe": 1513,
    "H200": 1979,
    "B200": 4500,
    "GB200": 5000,
}


def name(record):
    return record.name


@pytest.mark.parametrize("device", DEVICES, ids=name)
def test_peaks_are_what_the_dense_tensor_cores_give(device):
    multiprocessors, fmas, ghz, *_ = CHIPS[device.name]
    assert device.peak("fp16") == pytest.approx(multiprocessors * fmas * 2 * ghz * 1e9, rel=0.02)


@pytest.mark.parametrize("device", [device for device in DEVICES if CHIPS[device.name][3]], ids=name)
def test_fp32_is_what_the_ordinary_cores_give_and_not_tf32(device):
    multiprocessors, _, _, fmas, ghz, *_ = CHIPS[device.name]
    assert device.peak("fp32") == pytest.approx(multiprocessors * fmas * 2 * ghz * 1e9, rel=0.01)


@pytest.mark.parametrize("device", DEVICES, ids=name)
def test_memory_is_as_fast_as_its_bus(device):
    bits, gigabits = CHIPS[device.name][-2:]
    assert device.memory_bandwidth == pytest.approx(bits * gigabits * 1e9 / 8, rel=0.025)


@pytest.mark.parametrize("printed", SPARSE)
def test_no_peak_is_a_figure_with_sparsity(printed):
    assert hardware.device(printed).peak("fp16") == pytest.approx(SPARSE[printed] * 1e12 / 2, rel=0.02)


@pytest.mark.parametrize("device", DEVICES, ids=name)
def test_formats_are_in_proportion(device):
    peaks = dict(device.peaks)
    half = peaks["fp16"]
    assert peaks["fp32"] < half and peaks.get("bf16", half) == half
    assert peaks.get("tf32", half / 2) == pytest.approx(half / 2, rel=0.03)
    assert peaks.get("fp8", half * 2) == pytest.approx(half * 2, rel=0.02)


def test_links_count_one_direction():
    # What is sold as 160, 300, 600, 900 and 1,800 GB/s of NVLink, and as 32, 64 and 128 GB/s of PCIe 3, 4 and 5.
    sold = {
        "NVLink 1": 160,
        "NVLink 2": 300,
        "NVLink 3": 600,
        "NVLink 4": 900,
        "NVLink 5": 1800,
        "PCIe 3": 32,
        "PCIe 4": 64,
        "PCIe 5": 128,
    }
    for link, gigabytes in sold.items():
        assert hardware.link(link).bandwidth == pytest.approx(gigabytes * 1e9 / 2, rel=0.02)
    assert hardware.link("PCIe 6").bandwidth == pytest.approx(121e9)
    assert hardware.link("100 GbE").bandwidth == 12.5e9
    assert hardware.link("InfiniBand NDR").bandwidth == 50e9
    assert hardware.link("InfiniBand FDR").bandwidth == pytest.approx(54.54e9 / 8, rel=1e-3)


# By the documents in which each figure stands; a link's start-up times have theirs in `links`.
SOURCES = {
    "T4, V100-16, V100-32, A100-40, A100-80, L4, L40S": "NVIDIA .* datasheet",
    "H100, H100 PCIe, H200, B200, GB200": "NVIDIA .* (datasheet|brief)",
    "RTX 4090": "NVIDIA Ada GPU architecture whitepaper",
    "PCIe 3, PCIe 4, PCIe 5, PCIe 6": "PCI Express Base Specification",
    "NVLink 1, NVLink 2, NVLink 3, NVLink 4, NVLink 5, NVLink-C2C": "NVIDIA .* (whitepaper|brief)",
    "10 GbE, 25 GbE, 40 GbE, 50 GbE, 100 GbE, 200 GbE, 400 GbE, RoCE 400": "IEEE 802.3",
    "InfiniBand FDR, InfiniBand EDR, InfiniBand HDR, InfiniBand NDR, InfiniBand XDR": "IBTA InfiniBand roadmap",
    "8xT4, 8xL4": "Amazon EC2 .* instances",
    "DGX-1, DGX-2, DGX A100-40, DGX A100, DGX H100, DGX H200, DGX B200": "NVIDIA DGX.*datasheet",
    "4xRTX 4090": "NVIDIA Ada whitepaper",
    "Llama 3": "arXiv:2407.21783",
    "free": "none: for comparing with theory",
}


def test_what_is_known_by_name_and_where_its_figures_stand():
    known = {record.name: record.source for record in (*LINKS, *DEVICES, *NODES)}
    sources = {each: source for names, source in SOURCES.items() for each in names.split(", ")}
    assert set(known) == set(sources)
    for each, source in sources.items():
        assert re.search(source, known[each]), (each, known[each])


@pytest.mark.parametrize("record", [*DEVICES, *NODES], ids=name)
def test_the_parts_of_a_record_are_records_with_a_source_too(record):
    parts = [part for part in vars(record).values() if isinstance(part, (Link, Device))]
    assert parts and all(part in (*LINKS, *DEVICES) for part in parts)


def test_names_are_unique_however_they_are_written():
    names = [hardware.parts.plain(record.name) for record in (*DEVICES, *NODES)]
    assert len(set(names)) == len(names)
    assert len({hardware.parts.plain(link.name) for link in LINKS}) == len(LINKS)
    assert hardware.device("rtx4090") is hardware.device("RTX 4090") is hardware.device("rtx-4090")


@pytest.mark.parametrize("box", NODES, ids=name)
def test_nodes_make_clusters(box):
    cluster = hardware.cluster(box.name, 2)
    assert cluster == Cluster(box, 2) and cluster.size == 2 * box.count
    assert cluster.node_of(box.count - 1) == 0 and cluster.node_of(box.count) == 1
    assert pickle.loads(pickle.dumps(cluster)) == cluster and hash(cluster)


def test_a_cluster_is_made_of_parts():
    made = hardware.cluster("t4", 2, per_node=4, nic="25 GbE")
    assert (made.size, made.node.intra.name, made.node.num_nics) == (8, "PCIe 3", 1)
    assert made.name == "2 x 4xT4, 25 GbE"
    assert hardware.cluster("H100", per_node=8).node.intra is hardware.link("NVLink 4")
    slow = hardware.cluster("DGX H100", 2, nic="100 GbE", num_nics=1)
    assert (slow.node.num_nics, slow.node.nic.bandwidth, slow.node.count) == (1, 12.5e9, 8)
    assert hardware.cluster("DGX H100", per_node=4).node.num_nics == 4
    assert hardware.cluster("T4", per_node=2, intra=hardware.link("free")).node.intra.bandwidth == float("inf")


def box(cores=2, **more):
    """4 ranks that share the cores of a processor."""
    return Node("box", Device("d", (("fp32", 1.0),), GIB, 1.0), 4, Link("l", 0.0, 1.0), cores=cores, **more)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: hardware.cluster("H1000"), "no node or device is called 'H1000'; known: 8xT4, .*, H100, "),
        (lambda: hardware.link("token ring"), "no link is called 'token ring'; known: PCIe 3, "),
        (lambda: hardware.device("abacus"), "no device is called 'abacus'; known: T4, "),
        (lambda: hardware.node("T4"), "no node is called 'T4'; known: 8xT4, "),
        (lambda: hardware.cluster("T4", 2), "T4 has no network card: several need nic="),
        (lambda: hardware.cluster("DGX H100", 0), "a cluster has 1 node or more, not 0"),
        (lambda: hardware.cluster("T4", per_node=0), "count must be 1 or more, not 0"),
        (lambda: hardware.cluster("T4", num_nics=2), "give both nic and num_nics, or neither"),
        (lambda: hardware.cluster(Device("d", (("fp32", 1.0),), 1, 1.0)), "d has no link of its own: give intra="),
        (lambda: hardware.device("T4").peak("bf16"), "T4 has no arithmetic in bf16; it has fp32, fp16"),
        (lambda: Link("l", -1.0, 1.0), "link 'l': alpha_s and call_s must be 0 or more, bandwidth more than 0"),
        (lambda: Link("l", 0.0, 0.0), "bandwidth more than 0"),
        (lambda: Device("d", (), 1, 1.0), "device 'd': peaks and memory_bandwidth must be more than 0"),
        (lambda: box(busy_share=-0.5), "node 'box': cores and busy_share must be 0 or more, not 2 and -0.5"),
        (lambda: box(busy_share=float("nan")), "cores and busy_share must be 0 or more, not 2 and nan"),
        (lambda: box(busy_share=float("inf")), "cores and busy_share must be 0 or more, not 2 and inf"),
        (lambda: box(cores=-1), "cores and busy_share must be 0 or more, not -1 and 1.0"),
        (lambda: hardware.cluster("DGX-1").node_of(8), "DGX-1 has ranks 0 to 7, not 8"),
    ],
)
def test_what_is_not_known_or_cannot_be_is_told_in_one_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_an_operation_is_bound_by_arithmetic_or_by_memory():
    a100 = hardware.device("A100-80")
    # A product of 8192 x 8192 in bf16: 2 * 8192^3 FLOPs, 3 * 8192^2 * 2 bytes; 1.0995e12 / 312e12 = 3.524 ms.
    assert a100.time_s(2 * 8192**3, 3 * 8192**2 * 2, "bf16") == pytest.approx(3.524e-3, rel=1e-3)
    # Adding two tensors of 1 GB into a third: 3 GB / 2.039 TB/s = 1.471 ms.
    assert a100.time_s(0.25e9, 3e9) == pytest.approx(1.471e-3, rel=1e-3)


def test_dtypes_are_spelled_as_torch_does_or_as_datasheets_do():
    written = ("torch.float32", "bfloat16", "torch.float8_e4m3fn", "tf32")
    assert [spelled(dtype) for dtype in written] == ["fp32", "bf16", "fp8", "tf32"]
    assert hardware.device("H100").peak("torch.bfloat16") == 989.4e12


def test_ranks_that_share_cores_stretch_each_other():
    shared = box()
    # Figures are taken with 4 ranks busy on 2 cores: with 2 busy, or 1, each is twice as fast.
    assert [shared.stretch(busy) for busy in (1, 2, 3, 4)] == [0.5, 0.5, 0.75, 1.0]
    assert [dataclasses.replace(shared, cores=8).stretch(busy) for busy in (1, 4)] == [1.0, 1.0]
    assert dataclasses.replace(shared, cores=0).stretch(4) == 1.0
