"""Links, with sources: PCIe 3-6, NVLink 1-5, Ethernet 10-400, RoCE, InfiniBand FDR-XDR. Bytes/s in one direction.

Brochures give NVLink and PCIe in both directions added up: half of that stands here. Start-up times are those of
NCCL's own cost model (github.com/NVIDIA/nccl, src/graph/tuning.cc, ncclTunerConstantsDefaults), protocol LL, which
NCCL takes for small messages: per collective 6.6 us, and per message 0.6 us on NVLink, 1.0 us on PCIe, 5.0 us on a
network card that a rank has to itself. Left out: LL's lower bandwidth (large messages go by Simple, at full
bandwidth and higher latency), and packet headers (goodput is some 5-10% below these figures).
"""

from __future__ import annotations

from labkit.cost.parts import Link

CALL_S = 6.6e-6
NVLINK_S, PCIE_S, NIC_S = 0.6e-6, 1.0e-6, 5.0e-6
# Between two programs over kernel TCP: Hurwitz and Feng, "Initial End-to-End Performance Evaluation of 10-Gigabit
# Ethernet", Hot Interconnects 2003. The network's speed has grown since, the kernel's way through it much less.
TCP_S = 20e-6

_PCIE = "PCI Express Base Specification: {} per lane, 16 lanes, {}"
_NVLINK = "{}: {} links of {} GB/s per direction"
_ETHERNET = "IEEE {}; latency of kernel TCP: Hurwitz and Feng 2003"
_INFINIBAND = "IBTA InfiniBand roadmap: {} 4x"

PCIE_3 = Link("PCIe 3", PCIE_S, 8e9 * 16 / 8 * 128 / 130, CALL_S, _PCIE.format("3.0: 8 GT/s", "coded 128b/130b"))
PCIE_4 = Link("PCIe 4", PCIE_S, 16e9 * 16 / 8 * 128 / 130, CALL_S, _PCIE.format("4.0: 16 GT/s", "coded 128b/130b"))
PCIE_5 = Link("PCIe 5", PCIE_S, 32e9 * 16 / 8 * 128 / 130, CALL_S, _PCIE.format("5.0: 32 GT/s", "coded 128b/130b"))
PCIE_6 = Link(
    "PCIe 6",
    PCIE_S,
    64e9 * 16 / 8 * 242 / 256,
    CALL_S,
    _PCIE.format("6.0: 64 GT/s", "flits of 256 bytes less 14 of CRC and FEC"),
)

NVLINK_1 = Link("NVLink 1", NVLINK_S, 4 * 20e9, CALL_S, _NVLINK.format("NVIDIA P100 whitepaper", 4, 20))
NVLINK_2 = Link("NVLink 2", NVLINK_S, 6 * 25e9, CALL_S, _NVLINK.format("NVIDIA V100 whitepaper", 6, 25))
NVLINK_3 = Link("NVLink 3", NVLINK_S, 12 * 25e9, CALL_S, _NVLINK.format("NVIDIA A100 whitepaper", 12, 25))
NVLINK_4 = Link("NVLink 4", NVLINK_S, 18 * 25e9, CALL_S, _NVLINK.format("NVIDIA H100 whitepaper", 18, 25))
NVLINK_5 = Link("NVLink 5", NVLINK_S, 18 * 50e9, CALL_S, _NVLINK.format("NVIDIA Blackwell architecture brief", 18, 50))
# From a processor to its own GPU.
NVLINK_C2C = Link("NVLink-C2C", NVLINK_S, 450e9, CALL_S, "NVIDIA Grace Hopper whitepaper: 900 GB/s, both directions")

ETHERNET_10 = Link("10 GbE", TCP_S, 10e9 / 8, CALL_S, _ETHERNET.format("802.3ae-2002"))
ETHERNET_25 = Link("25 GbE", TCP_S, 25e9 / 8, CALL_S, _ETHERNET.format("802.3by-2016"))
ETHERNET_40 = Link("40 GbE", TCP_S, 40e9 / 8, CALL_S, _ETHERNET.format("802.3ba-2010"))
ETHERNET_50 = Link("50 GbE", TCP_S, 50e9 / 8, CALL_S, _ETHERNET.format("802.3cd-2018"))
ETHERNET_100 = Link("100 GbE", TCP_S, 100e9 / 8, CALL_S, _ETHERNET.format("802.3ba-2010"))
ETHERNET_200 = Link("200 GbE", TCP_S, 200e9 / 8, CALL_S, _ETHERNET.format("802.3bs-2017"))
ETHERNET_400 = Link("400 GbE", TCP_S, 400e9 / 8, CALL_S, _ETHERNET.format("802.3bs-2017"))
ROCE_400 = Link("RoCE 400", NIC_S, 400e9 / 8, CALL_S, "IEEE 802.3bs-2017, read and written remotely: no kernel between")

# 14.0625 Gb/s in each of 4 lanes, coded 64b/66b; from EDR on, what is sold is what is left after coding.
FDR = Link("InfiniBand FDR", NIC_S, 4 * 14.0625e9 * 64 / 66 / 8, CALL_S, _INFINIBAND.format("56 Gb/s before coding,"))
EDR = Link("InfiniBand EDR", NIC_S, 100e9 / 8, CALL_S, _INFINIBAND.format("100 Gb/s"))
HDR = Link("InfiniBand HDR", NIC_S, 200e9 / 8, CALL_S, _INFINIBAND.format("200 Gb/s"))
NDR = Link("InfiniBand NDR", NIC_S, 400e9 / 8, CALL_S, _INFINIBAND.format("400 Gb/s"))
XDR = Link("InfiniBand XDR", NIC_S, 800e9 / 8, CALL_S, _INFINIBAND.format("800 Gb/s"))

# For theory: communication that costs nothing.
FREE = Link("free", 0.0, float("inf"), 0.0, "none: for comparing with theory")

LINKS = (
    PCIE_3,
    PCIE_4,
    PCIE_5,
    PCIE_6,
    NVLINK_1,
    NVLINK_2,
    NVLINK_3,
    NVLINK_4,
    NVLINK_5,
    NVLINK_C2C,
    ETHERNET_10,
    ETHERNET_25,
    ETHERNET_40,
    ETHERNET_50,
    ETHERNET_100,
    ETHERNET_200,
    ETHERNET_400,
    ROCE_400,
    FDR,
    EDR,
    HDR,
    NDR,
    XDR,
    FREE,
)
