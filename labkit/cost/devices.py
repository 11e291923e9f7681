"""Devices, with sources. Peaks are *dense*: where a datasheet prints figures "with sparsity", half stands here.

fp16 and bf16 are products in 16 bits summed in 32, as training does (GeForce cards have a second, double figure for
sums in 16 bits). fp32 is ordinary arithmetic, which torch uses unless TF32 is allowed. A dtype that the tensor cores
do not know (bf16 on T4 and V100) is absent. Left out: what a kernel reaches of it, some 70-90% in large products.
"""

from __future__ import annotations

from labkit.cost import links
from labkit.cost.parts import GIB, Device

T4 = Device(
    "T4",
    (("fp32", 8.1e12), ("fp16", 65e12)),
    16 * GIB,
    320e9,
    links.PCIE_3,
    None,
    "NVIDIA T4 datasheet; NVIDIA T4 product brief for the memory (256 bits at 10 Gb/s)",
)
V100_16 = Device(
    "V100-16",
    (("fp32", 15.7e12), ("fp16", 125e12)),
    16 * GIB,
    900e9,
    links.PCIE_3,
    links.NVLINK_2,
    "NVIDIA V100 datasheet, SXM2",
)
V100_32 = Device(
    "V100-32",
    (("fp32", 15.7e12), ("fp16", 125e12)),
    32 * GIB,
    900e9,
    links.PCIE_3,
    links.NVLINK_2,
    "NVIDIA V100 datasheet, SXM2",
)
A100_40 = Device(
    "A100-40",
    (("fp32", 19.5e12), ("tf32", 156e12), ("fp16", 312e12), ("bf16", 312e12)),
    40 * GIB,
    1555e9,
    links.PCIE_4,
    links.NVLINK_3,
    "NVIDIA A100 datasheet, 40 GB SXM",
)
A100_80 = Device(
    "A100-80",
    (("fp32", 19.5e12), ("tf32", 156e12), ("fp16", 312e12), ("bf16", 312e12)),
    80 * GIB,
    2039e9,
    links.PCIE_4,
    links.NVLINK_3,
    "NVIDIA A100 datasheet, 80 GB SXM",
)
L4 = Device(
    "L4",
    (("fp32", 30.3e12), ("tf32", 60e12), ("fp16", 121e12), ("bf16", 121e12), ("fp8", 242.5e12)),
    24 * GIB,
    300e9,
    links.PCIE_4,
    None,
    "NVIDIA L4 datasheet, which prints tensor figures with sparsity (120, 242, 242, 485): halved",
)
L40S = Device(
    "L40S",
    (("fp32", 91.6e12), ("tf32", 183e12), ("fp16", 362e12), ("bf16", 362e12), ("fp8", 733e12)),
    48 * GIB,
    864e9,
    links.PCIE_4,
    None,
    "NVIDIA L40S datasheet, the figures without sparsity",
)
RTX_4090 = Device(
    "RTX 4090",
    (("fp32", 82.6e12), ("tf32", 82.6e12), ("fp16", 165.2e12), ("bf16", 165.2e12), ("fp8", 330.3e12)),
    24 * GIB,
    1008e9,
    links.PCIE_4,
    None,
    "NVIDIA Ada GPU architecture whitepaper, appendix A: dense, FP32 accumulate",
)
H100 = Device(
    "H100",
    (("fp32", 67e12), ("tf32", 494.7e12), ("fp16", 989.4e12), ("bf16", 989.4e12), ("fp8", 1978.9e12)),
    80 * GIB,
    3350e9,
    links.PCIE_5,
    links.NVLINK_4,
    "NVIDIA H100 datasheet, SXM, which prints tensor figures with sparsity (989, 1,979, 1,979, 3,958): halved",
)
H100_PCIE = Device(
    "H100 PCIe",
    (("fp32", 51e12), ("tf32", 378e12), ("fp16", 756e12), ("bf16", 756e12), ("fp8", 1513e12)),
    80 * GIB,
    2000e9,
    links.PCIE_5,
    None,
    "NVIDIA H100 datasheet, PCIe, which prints tensor figures with sparsity (756, 1,513, 1,513, 3,026): halved",
)
H200 = Device(
    "H200",
    (("fp32", 67e12), ("tf32", 494.7e12), ("fp16", 989.4e12), ("bf16", 989.4e12), ("fp8", 1978.9e12)),
    141 * GIB,
    4800e9,
    links.PCIE_5,
    links.NVLINK_4,
    "NVIDIA H200 datasheet, SXM, which prints tensor figures with sparsity (989, 1,979, 1,979, 3,958): halved",
)
B200 = Device(
    "B200",
    (("fp32", 80e12), ("tf32", 1100e12), ("fp16", 2250e12), ("bf16", 2250e12), ("fp8", 4500e12)),
    180 * GIB,
    8000e9,
    links.PCIE_5,
    links.NVLINK_5,
    "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, figures with sparsity (2,200, 4,500, 4,500, 9,000)"
    " halved; NVIDIA DGX B200 datasheet (1,440 GB and 64 TB/s for 8)",
)
GB200 = Device(
    "GB200",
    (("fp32", 90e12), ("tf32", 1250e12), ("fp16", 2500e12), ("bf16", 2500e12), ("fp8", 5000e12)),
    186 * GIB,
    8000e9,
    links.NVLINK_C2C,
    links.NVLINK_5,
    "NVIDIA Blackwell architecture brief, GB200 at 1,200 W, figures with sparsity (2,500, 5,000, 5,000, 10,000) halved;"
    " NVIDIA GB200 NVL72 datasheet (13.4 TB and 576 TB/s for 72)",
)

DEVICES = (T4, V100_16, V100_32, A100_40, A100_80, L4, L40S, RTX_4090, H100, H100_PCIE, H200, B200, GB200)
