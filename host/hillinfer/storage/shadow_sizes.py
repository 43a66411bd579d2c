# SPDX-License-Identifier: Apache-2.0
"""What a segment of one layer takes in DRAM besides its rows."""

from __future__ import annotations

from hillinfer.hie.probe_shadow import probe_bytes
from hillinfer.storage.shadow_store import shadow_bytes
from hillinfer_model.kernel_spec import KernelSpec

# A shadow in DRAM has the sinks beside it, so its copy is that of a segment without.
NO_SINKS = 1
_STATISTICS_ITEM_BYTES = 5
_SUM_BYTES = 8


def held_bytes(spec: KernelSpec) -> int:
    """Return the most bytes of one segment's shadow in DRAM, with the copy of its probe tokens."""
    return shadow_bytes(spec) + probe_bytes(spec, NO_SINKS)


def statistics_bytes(spec: KernelSpec) -> int:
    """Return the bytes of one segment's channel statistics and checksum in one layer."""
    return spec.kv_heads * spec.head_dim * _STATISTICS_ITEM_BYTES + _SUM_BYTES
