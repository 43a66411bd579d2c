# SPDX-License-Identifier: Apache-2.0
"""The two processes that can read a kernel's keys in the HLS C++."""

from __future__ import annotations

from enum import StrEnum

from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.memory_model import REALISTIC


class KeyReader(StrEnum):
    """How key beats are read.

    `bursts` requests manual bursts ahead of their data (`hw/hls/read_keys.h`), which mixes requests
    and beats in one loop. `linear` reads in plain loops (`hw/hls/read_linear.h`).
    """

    BURSTS = "bursts"
    LINEAR = "linear"


def linear_loss(spec: KernelSpec, beats: int | None = None) -> float:
    """Return the share of cycles that the linear reader waits for memory; modelled.

    Parameters
    ----------
    spec
        The kernel's.
    beats
        Of a run that lies in one piece; None for the shadow of a full segment.
    """
    latency = sum(REALISTIC.read_latency) / 2
    return latency / (latency + (spec.segment_beats if beats is None else beats))


# The line that chooses for everything that is rendered without saying which.
KEY_READER = KeyReader.BURSTS
