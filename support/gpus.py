"""Data-sheet speeds of GPUs, for MFU and --plan."""

# Dense 16-bit tensor-core peaks in TFLOP/s with float32 accumulation, by torch.cuda.get_device_name
# without the vendor. Names are exact, since variants differ (H100 NVL, H100 SXM); others are
# measured. Sources: data sheets of NVIDIA (half of "with sparsity") and AMD; for GeForce the
# architecture white papers ("FP16 Tensor TFLOPS with FP32 Accumulate"). RTX PRO 6000: an
# eighth of NVIDIA's 4,030 and 3,511 "AI TOPS", as 165.2 is of the RTX 4090's 1,321.
# fmt: off
PEAK_TFLOPS = {
    "GB300": 2500, "B300 SXM6 AC": 2250, "GB200": 2500, "B200": 2250, "GH200 480GB": 990,
    "H200": 989, "H200 NVL": 836, "H100 80GB HBM3": 989, "H100 NVL": 836, "H100 PCIe": 756,
    "H800": 989, "H800 PCIe": 756, "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312,
    "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312, "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312,
    "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 155, "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2, "GeForce RTX 3090 Ti": 80,
    "GeForce RTX 3090": 71, "V100-SXM2-16GB": 125, "V100-SXM2-32GB": 125, "V100-PCIE-16GB": 112,
    "V100-PCIE-32GB": 112, "V100S-PCIE-32GB": 130, "T4": 65, "AMD Instinct MI355X": 2500,
    "AMD Instinct MI350X": 2300, "AMD Instinct MI325X": 1307, "AMD Instinct MI300X": 1307,
}
# fmt: on


def data_sheet_flops(name: str) -> float | None:
    """16-bit tensor-core FLOP/s by torch.cuda.get_device_name; None if not in PEAK_TFLOPS."""
    tflops = PEAK_TFLOPS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return tflops and tflops * 1e12
