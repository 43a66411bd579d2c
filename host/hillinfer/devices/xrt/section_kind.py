# SPDX-License-Identifier: Apache-2.0
"""The sections of an xclbin that this project writes or reads."""

from __future__ import annotations

from enum import IntEnum


class SectionKind(IntEnum):
    """Numbers of `axlf_section_kind` in XRT's xclbin.h."""

    BITSTREAM = 0
    EMBEDDED_METADATA = 2
    MEM_TOPOLOGY = 6
    CONNECTIVITY = 7
    IP_LAYOUT = 8
    CLOCK_FREQ_TOPOLOGY = 11
    BUILD_METADATA = 14
    USER_METADATA = 16
