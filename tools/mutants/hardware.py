# SPDX-License-Identifier: Apache-2.0
"""All faults in the golden model and in the kernels."""

from __future__ import annotations

from mutants.golden_model import GOLDEN
from mutants.hls import HLS
from mutants.mutant import Mutant
from mutants.rtl import RTL

HARDWARE: tuple[Mutant, ...] = (*GOLDEN, *HLS, *RTL)
