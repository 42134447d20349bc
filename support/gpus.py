"""What only a GPU needs: data-sheet speeds, and the largest micro-batch by trial."""

import gc

import torch

from support.devices import is_out_of_memory

# Dense 16-bit tensor-core peaks in TFLOP/s with float32 accumulation, by torch.cuda.get_device_name
# without the vendor. Names are exact, since variants differ (H100 NVL, H100 SXM); others are
# measured. Sources: NVIDIA's data sheets (half of "with sparsity"); for GeForce the architecture
# white papers ("FP16 Tensor TFLOPS with FP32 Accumulate"); AMD's MI300X data sheet. H20: resellers'
# sheets. RTX 4090 D: an eighth of NVIDIA's 1,177 "AI TOPS", as 165.2 is of the 4090's 1,321.
# fmt: off
PEAK_TFLOPS = {
    "B200": 2250, "GH200 480GB": 990, "H200": 989, "H200 NVL": 836, "H100 80GB HBM3": 989,
    "H100 NVL": 836, "H100 PCIe": 756, "H800": 989, "H800 PCIe": 756, "H20": 148,
    "A100-SXM4-40GB": 312, "A100-SXM4-80GB": 312, "A100-PCIE-40GB": 312, "A100 80GB PCIe": 312,
    "A800-SXM4-80GB": 312, "A800 80GB PCIe": 312, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "RTX 6000 Ada Generation": 364, "RTX A6000": 155, "GeForce RTX 5090": 209.5,
    "GeForce RTX 4090": 165.2, "GeForce RTX 4090 D": 147.1, "GeForce RTX 3090 Ti": 80,
    "GeForce RTX 3090": 71, "V100-SXM2-16GB": 125, "V100-SXM2-32GB": 125, "V100-PCIE-16GB": 112,
    "V100-PCIE-32GB": 112, "T4": 65, "AMD Instinct MI300X": 1307,
}
# fmt: on


def data_sheet_flops(name: str) -> float | None:
    """16-bit tensor-core FLOP/s by torch.cuda.get_device_name; None if not in PEAK_TFLOPS."""
    tflops = PEAK_TFLOPS.get(name.removeprefix("NVIDIA ").removeprefix("Tesla "))
    return tflops and tflops * 1e12


def fits(
    model: torch.nn.Module,
    B: int,
    T: int,
    low_memory: bool,
    autocast: torch.autocast,
    several_ranks: bool,
    shards: int,
    keeps_logits: bool,
    accumulates: bool,
) -> bool:
    """Tries whether a GPU has the memory for a step with micro-batches of B sequences.

    Runs an eager forward and backward pass with the chunked loss, which stores no less than a
    compiled one, beside what else a step needs: the optimizer's moments, divided by `shards`;
    buffers for several ranks; keeps_logits: those of a compiled loss, and their gradient;
    accumulates: gradients of earlier micro-steps (or DDP's buckets) during the backward pass."""
    weight, (V, _) = model.wte.weight, model.wte.weight.shape
    reserve = 8 * model.num_parameters() // shards
    if keeps_logits:
        reserve += 2 * B * T * (V + -V % 64) * autocast.fast_dtype.itemsize
    if several_ranks:
        reserve += 2**30  # an allowance for NCCL
    loss_function = model.loss_function
    try:
        model.prepare(low_memory=low_memory)
        x = torch.zeros(B, T, dtype=torch.int64, device=weight.device)
        reserved = torch.empty(reserve, dtype=torch.uint8, device=weight.device)
        if accumulates:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        with autocast:
            _, loss = model(x, x)
        loss.backward()
        del reserved
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.loss_function = loss_function
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
