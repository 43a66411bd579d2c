# SPDX-License-Identifier: Apache-2.0
"""The paper's machine, models and claims, with where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hillinfer.doctor.profile import SHAPES, ModelFigures


@dataclass(frozen=True)
class EdgeMachine:
    """A PC with a GPU, a plain drive and a card near a drive of its own; bytes and seconds.

    Parameters
    ----------
    gpu_bytes, gpu_memory, gpu_flops
        Memory of the GPU, bytes a second out of it, and 16-bit operations a second.
    gpu_work
        Bytes of the GPU that are neither weights nor KV.
    host_bytes, host_scoring
        DRAM that KV and weights may take, and the bytes a second that the host scores.
    link
        Bytes a second between host and GPU: the paper's Bc.
    drive, drive_write
        Bytes a second out of the plain drive, and into either drive.
    card_link
        Bytes a second from the card's drive to the host: the paper's Bs.
    card_stream
        Bytes a second from the card's NAND to its FPGA.
    card_bytes, card_memory
        The card's DRAM, and bytes a second out of it.
    """

    gpu_bytes: float
    gpu_memory: float
    gpu_flops: float
    gpu_work: float
    host_bytes: float
    host_scoring: float
    link: float
    drive: float
    drive_write: float
    card_link: float
    card_stream: float
    card_bytes: float
    card_memory: float


_GB = 1e9
PAPER_MACHINE = EdgeMachine(
    gpu_bytes=24 * _GB,
    gpu_memory=1008 * _GB,
    gpu_flops=0.5 * 165.2e12,
    gpu_work=3 * _GB,
    host_bytes=56 * _GB,
    host_scoring=60 * _GB,
    link=25 * _GB,
    drive=5 * _GB,
    drive_write=2 * _GB,
    card_link=3.2 * _GB,
    card_stream=3.2 * _GB,
    card_bytes=4 * _GB,
    card_memory=0.94 * 19.2 * _GB,
)
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_bytes": "paper, section 5.2",
        "gpu_memory": "NVIDIA's data of the RTX 4090",
        "gpu_flops": "half of NVIDIA's 165.2 TFLOPS in 16 bits; the half is assumed",
        "gpu_work": "assumed: activations and buffers of the paper's framework",
        "host_bytes": "64 GB (paper, section 5.2) less 8 GB for everything else, assumed",
        "host_scoring": "assumed: a third of the eight DDR4-2933 channels of a Xeon 8352V",
        "link": "PCIe 4.0 x16 (paper, section 4.3), 32 GB/s less a fifth, assumed",
        "drive": "a fifth of 12k tokens of Qwen-7B in 2 s (paper, section 3.1): 10.3 GB",
        "drive_write": "assumed",
        "card_link": "paper, section 5.2",
        "card_stream": "the same: 'a peak bandwidth of approximately 3.2 GB/s'",
        "card_bytes": "paper, section 5.2",
        "card_memory": "one DDR4-2400 channel; 0.94 of it by this project's cycle model",
    }
)

_SEVEN = ModelFigures("llama", 32, 4096, 11008, 32, 32, 128)
MODELS: Mapping[str, ModelFigures] = MappingProxyType(
    {
        "opt-6.7b": SHAPES["opt-6.7b"],
        "longchat-7b": _SEVEN,
        "qwen-7b": replace(_SEVEN),
        "llama-13b": SHAPES["llama-13b"],
    }
)
# What a model was trained for, tokens; times beyond are those of a model that nobody would ask.
POSITIONS: Mapping[str, int] = MappingProxyType(
    {"opt-6.7b": 2048, "longchat-7b": 16384, "qwen-7b": 8192, "llama-13b": 2048}
)

ALPHA, BATCH = 0.2, 8
"""Of the paper's experiments (section 5.2)."""

CLAIMS: Mapping[str, str] = MappingProxyType(
    {
        "12": "latency 76.25 to 88.32 % lower than the baselines'",
        "13": "4.21 to 8.56 times as fast, more with longer contexts",
        "14": "batch 10: H2O-like and prefetch-based above 50 s, HillInfer well under 25 s",
        "15": "HillInfer runs with batches of 20 to 25; no figure is in the text",
        "16a": "+HKM, then +HKM & APP take less than the prefetch-based baseline, in this order",
        "16b": "least at the β of a formula of section 5.4",
    }
)
