# SPDX-License-Identifier: Apache-2.0
"""All faults in the golden model, in the kernels and around them."""

from __future__ import annotations

from mutants.cards import CARDS
from mutants.golden_model import GOLDEN
from mutants.hls import HLS
from mutants.mutant import Mutant
from mutants.queries import QUERIES
from mutants.rtl import RTL

HARDWARE: tuple[Mutant, ...] = (*GOLDEN, *HLS, *RTL, *CARDS, *QUERIES)
