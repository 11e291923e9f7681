"""Nodes, with sources: what stands in one box, how its devices are linked, and its network cards for training.

Left out: storage and management networks, and how devices share PCIe switches (each has its 16 lanes to itself).
"""

from __future__ import annotations

from labkit.cost import devices, links
from labkit.cost.parts import Node

T4_X8 = Node("8xT4", devices.T4, 8, links.PCIE_3, links.ETHERNET_100, 1, source="Amazon EC2 G4 instances: g4dn.metal")
L4_X8 = Node("8xL4", devices.L4, 8, links.PCIE_4, links.ETHERNET_100, 1, source="Amazon EC2 G6 instances: g6.48xlarge")
RTX_4090_X4 = Node(
    "4xRTX 4090",
    devices.RTX_4090,
    4,
    links.PCIE_4,
    links.ETHERNET_10,
    1,
    source="a workstation: cards without NVLink (NVIDIA Ada whitepaper), 10GBASE-T on the board",
)
DGX_1 = Node("DGX-1", devices.V100_32, 8, links.NVLINK_2, links.EDR, 4, source="NVIDIA DGX-1 with V100, datasheet")
DGX_2 = Node("DGX-2", devices.V100_32, 16, links.NVLINK_2, links.EDR, 8, source="NVIDIA DGX-2 datasheet")
DGX_A100_40 = Node(
    "DGX A100-40", devices.A100_40, 8, links.NVLINK_3, links.HDR, 8, source="NVIDIA DGX A100 datasheet, 320 GB"
)
DGX_A100 = Node(
    "DGX A100", devices.A100_80, 8, links.NVLINK_3, links.HDR, 8, source="NVIDIA DGX A100 datasheet, 640 GB"
)
DGX_H100 = Node("DGX H100", devices.H100, 8, links.NVLINK_4, links.NDR, 8, source="NVIDIA DGX H100 datasheet")
DGX_H200 = Node("DGX H200", devices.H200, 8, links.NVLINK_4, links.NDR, 8, source="NVIDIA DGX H200 datasheet")
DGX_B200 = Node("DGX B200", devices.B200, 8, links.NVLINK_5, links.NDR, 8, source="NVIDIA DGX B200 datasheet")
LLAMA_3 = Node(
    "Llama 3",
    devices.H100,
    8,
    links.NVLINK_4,
    links.ROCE_400,
    8,
    source="The Llama 3 Herd of Models, arXiv:2407.21783, section 3.3.1: H100 (80 GB) in Grand Teton, RoCE 400 Gb/s",
)

NODES = (T4_X8, L4_X8, RTX_4090_X4, DGX_1, DGX_2, DGX_A100_40, DGX_A100, DGX_H100, DGX_H200, DGX_B200, LLAMA_3)
