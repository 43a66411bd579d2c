# SPDX-License-Identifier: Apache-2.0
"""GGUF files: their metadata, their weights unpacked to floats, and the way to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hillinfer.models.errors import ModelError


def load_gguf(file: Path, dtype: torch.dtype) -> Any:
    """Return the causal language model of a GGUF file, every weight unpacked to `dtype`.

    Raises
    ------
    ModelError
        Where transformers does not know the file's architecture.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        return AutoModelForCausalLM.from_pretrained(
            file.parent,
            # Whole: transformers would take a bare name from the current directory first.
            gguf_file=str(file.absolute()),
            dtype=dtype,
            # Otherwise the blocks stay packed wherever a GGUF kernel happens to be installed, and
            # the same file gives other logits on another machine.
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
    except (ValueError, OSError, ImportError) as error:
        raise ModelError(f"cannot load {file}: {' '.join(str(error).split())}") from error


def save_as_folder(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as an ordinary safetensors folder, in float32.

    float32 because it holds the products of block scales and codes without rounding.
    """
    from transformers import AutoTokenizer

    model = load_gguf(file, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=str(file.absolute()))
    # The unpacked model is no longer a quantised one, but save_pretrained refuses what once was.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
