# SPDX-License-Identifier: Apache-2.0
"""Launches of `make_shadow`: what the kernel is told, and whether it has done it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hillinfer.devices.device import StoredRows
from hillinfer.errors import DeviceError
from hillinfer_model.beats import Beats
from hillinfer_model.descriptor import Descriptor
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_error import ErrorCode, LaunchError
from hillinfer_model.statistics_block import pack_statistics
from hillinfer_model.status_beat import StatusBeat

# Segments whose rows lie in a device's memory at once.
ROWS_TOGETHER = 4


def shadow_descriptors(
    spec: KernelSpec, rows: Sequence[StoredRows], shadows: Sequence[int]
) -> tuple[Beats, Beats]:
    """Return descriptors and statistics of a launch that makes shadows (contract, section 10).

    Parameters
    ----------
    spec
        Of the kernel.
    rows
        Of each segment, which lie one behind the other in the kernel's buffer.
    shadows
        Where each shadow goes, in beats from the start of the buffer of shadows.

    Returns
    -------
    uint8 of shapes (segments, 64) and (beats, 64).
    """
    blocks = [pack_statistics(one.statistics, spec) for one in rows]
    descriptors, first = [], 0
    for index, (one, shadow) in enumerate(zip(rows, shadows, strict=True)):
        beats = one.byte_count // BEAT_BYTES
        descriptors.append(
            Descriptor(
                shadow=shadow,
                query=first,
                score=0,
                base_position=one.base_position,
                tokens=spec.segment_tokens,
                row_stride=beats // spec.segment_tokens,
                statistics=index * len(blocks[0]),
            ).pack()
        )
        first += beats
    return np.concatenate(descriptors), np.concatenate(blocks)


def check_made(spec: KernelSpec, status: Beats) -> None:
    """Raise DeviceError where a launch has not made the shadow of every segment.

    `status` is uint8 of shape (segments, 64), the launch's status beats.
    """
    for index in range(len(status)):
        try:
            beat = StatusBeat.unpack(status[index : index + 1])
        except (LaunchError, ValueError) as error:
            raise DeviceError(f"segment {index} of a launch left no status: {error}") from error
        if beat.error is not ErrorCode.NONE:
            raise DeviceError(f"segment {index} of a launch ended with error {beat.error.name}")
        if beat.tokens_complete != spec.segment_tokens:
            raise DeviceError(
                f"the device made a shadow of {beat.tokens_complete} of {spec.segment_tokens} "
                f"tokens of segment {index}"
            )
