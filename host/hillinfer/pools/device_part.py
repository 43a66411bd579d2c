# SPDX-License-Identifier: Apache-2.0
"""What DRAM holds because a device scores."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer.devices.host_devices import HOST_DEVICES
from hillinfer.hie.probe_shadow import probe_bytes
from hillinfer.storage.shadow_store import shadow_bytes
from hillinfer_model.kernel_spec import KernelSpec

# The newest 256 tokens lie in two segments at most.
_NEWEST_SHADOWS = 2


@dataclass(frozen=True)
class DevicePart:
    """Bytes beyond those that the host needs to score by itself.

    Parameters
    ----------
    probe_bytes
        The probe tokens of all segments, wherever their shadows lie.
    staging_bytes
        The buffer that shadows are brought back into, and copies of those of the newest tokens.
    """

    probe_bytes: int = 0
    staging_bytes: int = 0

    @classmethod
    def of(
        cls, device: str, spec: KernelSpec, layers: int, tokens: int, sequences: int
    ) -> DevicePart:
        """Return the part of a device of the host's table for `sequences` of `tokens` each.

        How much room a card has is not known before it is opened: its room lowers nothing here.
        """
        if device in HOST_DEVICES:
            return cls()
        segments = -(-tokens // spec.segment_tokens)
        return cls(
            probe_bytes=layers
            * sequences
            * sum(probe_bytes(spec, number) for number in range(segments)),
            staging_bytes=(1 + _NEWEST_SHADOWS) * shadow_bytes(spec),
        )
