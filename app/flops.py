"""How much arithmetic a sample takes, and how much a device can do: what "model FLOP/s utilization" (MFU) is made of."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

_BACKWARD = 2
"""The backward pass takes twice the forward's arithmetic: the gradients of weights and of inputs each are as many products
(Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, arXiv:2104.04473, appendix)."""

# Dense FLOP/s with (16-bit, TF32, float32) numbers, from the makers' data sheets; those with sparsity are twice as high.
# A name that is part of another comes after it.
_PEAKS: dict[str, tuple[float | None, float | None, float]] = {
    "B200": (2250e12, 1125e12, 75e12),  # NVIDIA DGX B200 datasheet, 1/8 of it
    "H200": (989.4e12, 494.7e12, 66.9e12),  # NVIDIA H200 datasheet
    "H100 PCIe": (756e12, 378e12, 51e12),  # NVIDIA H100 datasheet
    "H100 NVL": (835e12, 417e12, 60e12),
    "GH200": (989.4e12, 494.7e12, 66.9e12),  # NVIDIA GH200 datasheet
    "H100": (989.4e12, 494.7e12, 66.9e12),
    "A100": (312e12, 156e12, 19.5e12),  # NVIDIA A100 datasheet
    "A40": (149.7e12, 74.8e12, 37.4e12),  # NVIDIA A40 datasheet
    "A30": (165e12, 82e12, 10.3e12),  # NVIDIA A30 datasheet
    "L40S": (362e12, 183e12, 91.6e12),  # NVIDIA L40S datasheet
    "V100": (125e12, None, 15.7e12),  # NVIDIA V100 datasheet; 16-bit: fp16 only
    "MI300X": (1307.4e12, 653.7e12, 163.4e12),  # AMD Instinct MI300X datasheet
}


def of_training_sample(model: torch.nn.Module, *, channels: int, image_size: tuple[int, int]) -> float:
    """Return the floating-point operations of a sample's forward and backward pass.

    Counts what is in matrix products and convolutions, each product and each sum as one; recomputation does not count.

    Args:
        model: on any device, whole: not yet divided among processes.
        channels: of an image.
        image_size: height and width in pixels.
    """
    tensors = {key: tensor.to("meta") for key, tensor in (*model.named_parameters(), *model.named_buffers())}
    images = torch.empty(2, channels, *image_size, dtype=next(model.parameters()).dtype, device="meta")
    # On tensors without data: no arithmetic, memory or random numbers are spent.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        torch.func.functional_call(model, tensors, (images,))
    forward: int = counter.get_total_flops()
    return (1 + _BACKWARD) * forward / len(images)


def peak_per_s(device: torch.device, *, mixed_precision: str) -> float | None:
    """Return the FLOP/s that the maker claims for a device, or None where none is known, as for CPUs.

    `mixed_precision` is Accelerate's: no, fp16, bf16 or fp8.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for part, peaks in _PEAKS.items() if part in name), None)
    if peaks is None or mixed_precision == "fp8":
        return None
    half, tf32, single = peaks
    if mixed_precision in ("fp16", "bf16"):
        return half
    # Convolutions round to TF32 unless they are told not to; that is what most of a vision model's arithmetic is.
    return (tf32 or single) if torch.backends.cudnn.allow_tf32 else single
