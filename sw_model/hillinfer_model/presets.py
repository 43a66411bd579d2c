# SPDX-License-Identifier: Apache-2.0
"""Kernel specs of real models, by name."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle


@dataclass(frozen=True)
class Preset:
    """What a kernel must know of a model's attention.

    Parameters
    ----------
    head_dim
        Channels of one head.
    kv_heads
        KV heads of one layer.
    group_size
        Query heads per KV head (G).
    layers
        Layers, each with a shadow of its own.
    block_tokens
        Tuples of one score block at most: what the host can merge before a segment ends.
    """

    head_dim: int
    kv_heads: int
    group_size: int
    layers: int
    block_tokens: int = 1024


PRESETS = MappingProxyType(
    {
        # Short blocks, so that a segment's scores come in parts everywhere this model is used.
        "smollm2-135m": Preset(64, 3, 3, 30, block_tokens=256),
        "qwen2.5-0.5b": Preset(64, 2, 7, 24),
        "opt-2.7b": Preset(80, 32, 1, 32),
        "phi-3-mini": Preset(96, 32, 1, 32),
        "llama-3.1-8b": Preset(128, 8, 4, 32),
        "opt-6.7b": Preset(128, 32, 1, 32),
        "llama-13b": Preset(128, 40, 1, 40),
        "gemma-2b": Preset(256, 1, 8, 18),
    }
)


def preset_spec(name: str, key_mode: KeyMode, rule: Rule, queries: int = 1) -> KernelSpec:
    """Return the spec of a named model's kernel.

    Parameters
    ----------
    name
        A key of `PRESETS`.
    key_mode, rule
        Where key codes come from; how they become one score.
    queries
        That one pass over the keys scores at most.

    Raises
    ------
    ValueError
        Where no preset has the name, or a pass has no such number of queries.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is named {name!r}; there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    # Narrow codes cost less as bit planes in LUTs than as multipliers.
    narrow = key_mode in (KeyMode.INT4, KeyMode.INT2)
    return KernelSpec(
        preset.head_dim,
        preset.kv_heads,
        preset.group_size,
        key_mode=key_mode,
        rule=rule,
        block_tokens=preset.block_tokens,
        product_style=ProductStyle.LUT if narrow else ProductStyle.DSP,
        queries=queries,
    )
