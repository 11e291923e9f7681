"""Published figures of links, hardware and collectives, and how each is worked out here.

The rows stand in tests/data/published_values.json, each with its source. EQUAL are reproduced to the row's own
tolerance (of NCCL's three protocols, LL), BELOW are measurements that must stay under what the wires allow, LEFT_OUT
names the others and why. Rows of other families (memory, FLOPs, pipelines, step times) belong to other formulas.
"""

import json
import re
from pathlib import Path

from labkit.cost import comm, hardware, links, moved, shapes, sharding
from labkit.cost.groups import on_cluster
from labkit.cost.layout import Layout
from labkit.cost.named import named

ROWS = json.loads((Path(__file__).parent.parent / "data" / "published_values.json").read_text())
FAMILY = re.compile(
    r"nccl\.|hw\.|zero\.(comm|bw)\.|ptdp\.(comm|bisection)\.|playbook\.coll\.|zeropp\.|mics\.|offload\.min_comm"
    r"|infinity\.(bw|pcie)|.*\.pct_peak$|llama3\..*\.mfu$"
)
OURS = {
    "alltoall": "all_to_all",
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
}
DEVICES = {
    "V100-SXM2-32GB": "V100-32",
    "A100-SXM-40GB": "A100-40",
    "A100-SXM-80GB": "A100-80",
    "H100-SXM": "H100",
    "H100-PCIe": "H100 PCIe",
    "H200-SXM": "H200",
    "B200-SXM": "B200",
    "GB200": "GB200",
    "L40S": "L40S",
}
WIRES = {"NVLink3 A100": "NVLink 3", "NVLink4 H100/H200": "NVLink 4", "PCIe4 x16": "PCIe 4", "PCIe5 x16": "PCIe 5"}
NVLS = "reduced in the switch (NVLS): fewer bytes on the wire than any algorithm here"


def family():
    return [row for row in ROWS if FAMILY.match(row["id"])]


def sent(op, elements, n):
    return comm.sent_bytes(op, elements, n)


def zero_elements(row):
    """Elements sent per parameter as ranks grow without bound; the exact figure is (n-1)/n of it."""
    n = 1_000_000
    gathered, scattered = sent("all_gather", 1, n), sent("reduce_scatter", 1, n)
    return (2 * gathered if row["inputs"]["stage"] == 3 else gathered) + scattered


def tensor_parallel_elements(row):
    """Per transformer layer two all-reduces forward and two backward, each of b*s*h."""
    given = row["inputs"]
    return 4 * sent("all_reduce", given["b"] * given["s"] * given["h"], given["t"])


def pipeline_elements(row):
    given = row["inputs"]
    return sent("send", given["b"] * given["s"] * given["h"], 2)


def bus_bandwidth(row):
    given = row["inputs"]
    return comm.busbw("all_reduce", given["bytes"], given["n"], given["time_us"] * 1e-6) / 1e9


def percent_of_peak(row):
    """Of our own device's peak, not of the one that the row gives."""
    device = {312: "A100-80", 989: "H100"}[row["inputs"]["peak"]]
    return 100 * row["inputs"]["tf"] * 1e12 / hardware.device(device).peak("bf16")


def wire(row):
    return hardware.link(WIRES[row["inputs"]["link"]]).bandwidth / 1e9


def zeropp_share(row):
    """Of M, the parameters in 16 bits, what leaves a node: with all of ZeRO++ on."""
    found = sharding.crossing(Layout(dp=64, zero=3, zeropp="all"), 10**9)
    names = {"fwd_allgather": "forward", "bwd_allgather": "backward", "reduce_scatter": "gradients"}
    name = row["id"].removeprefix("zeropp.")
    return (sum(found.values()) if name == "total" else found[names[name]]) / 2e9


def offloaded_bytes(row):
    """Over the link to the host, per parameter and step."""
    model = named("llama-3.1-8b")
    found = moved.communication_bytes(model, Layout(zero=1, offload="optimizer"), 0)
    return sum(found["host"].values()) / shapes.parameters(model)


EQUAL = (
    (
        r"nccl\.factor\.",
        lambda row: comm.bus_factor(OURS.get(row["inputs"]["coll"], row["inputs"]["coll"]), row["inputs"]["n"]),
    ),
    (r"nccl\.a100x8\.ar\.", bus_bandwidth),
    (r"zero\.comm\.", zero_elements),
    (r"ptdp\.comm\.tp_layer", tensor_parallel_elements),
    (r"ptdp\.comm\.pp_p2p", pipeline_elements),
    (r".*\.pct_peak$|llama3\..*\.mfu$", percent_of_peak),
    (r"hw\..*\.tflops$", lambda row: hardware.device(DEVICES[row["inputs"]["gpu"]]).peak("fp16") / 1e12),
    (r"hw\..*\.mem_bw$", lambda row: hardware.device(DEVICES[row["inputs"]["gpu"]]).memory_bandwidth / 1e9),
    (r"hw\.link\.PCIe3", lambda row: links.PCIE_3.bandwidth / 1e9),
    (r"hw\.link\.", wire),
    # The paper counts both directions.
    (r"zero\.bw\.nvswitch_v100", lambda row: 2 * links.NVLINK_2.bandwidth / 1e9),
    (r"zeropp\.", zeropp_share),
    (r"offload\.min_comm", offloaded_bytes),
    (r"nccl\.alpha\.base\.ring", lambda row: links.CALL_S * 1e6),
    (r"nccl\.alpha\.pci\.ring", lambda row: links.PCIE_S * 1e6),
    (r"nccl\.alpha\.net\.tree", lambda row: links.NIC_S * 1e6),
)
BELOW = (
    (r"nccl\.h200x8\.16GiB\..*_ring", "DGX H200", 16 * 2**30),
    (r"nccl\.b200\.1n_4n\.16GiB", "DGX B200", 16 * 2**30),
    (r"nccl\.b200\.1n_4n\.4GiB", "DGX B200", 4 * 2**30),
    (r"nccl\.b200\.1n_4n\.1GiB", "DGX B200", 2**30),
    (r"playbook\.coll\.", "DGX H100", 256e6),
)
LEFT_OUT = (
    (r"nccl\.h200x8\.16GiB\.all-reduce_NVLS|nccl\.h200x8\.ar\.64MiB|nccl\.h200\.8GiB\.|nccl\.nvls_eff", NVLS),
    (r"nccl\.alpha\.base\.tree", "one start per call stands for all algorithms: the ring's"),
    (r"hw\.mamf\.", "what a kernel reaches of the peak, or a device that is not in the table"),
    (r"mics\.", "no figure"),
    (r"infinity\.bw\.", "a requirement on a training step, no property of a link"),
    (r"infinity\.pcie_single", "what copies reach of a PCIe 3 link; links here are as specified"),
    (r"ptdp\.bisection", "a whole network's bisection; networks here never block"),
)


def first(table, row):
    return next((entry[1:] for entry in table if re.match(entry[0], row["id"])), None)


def wires_allow(row, node, num_bytes):
    """Bus bandwidth, in GB/s, of the usual algorithm among all ranks of so many nodes."""
    given = row["inputs"]
    kind = given.get("coll", "").split()[0].replace("-", "_") if "coll" in given else row["id"].split(".")[2]
    op = {"1n_4n": "all_reduce"}.get(row["id"].split(".")[2], OURS.get(kind, kind))
    group = on_cluster(hardware.cluster(node, given.get("nodes", 1)))
    return comm.busbw(op, num_bytes, group.size, comm.group_time_s(op, num_bytes, group)) / 1e9
