# SPDX-License-Identifier: Apache-2.0
"""All mutants that the tests must kill."""

from __future__ import annotations

from mutants.broken_off import BROKEN_OFF
from mutants.caches import CACHES
from mutants.catalogue import CATALOGUE
from mutants.coded import CODED
from mutants.frontier import FRONTIER
from mutants.hardware import HARDWARE
from mutants.hosts import HOSTS
from mutants.later_prompts import LATER_PROMPTS
from mutants.left_behind import LEFT_BEHIND
from mutants.makers import MAKERS
from mutants.mutant import Mutant
from mutants.native import NATIVE
from mutants.placement import PLACEMENT
from mutants.predicted import PREDICTED
from mutants.prompts import PROMPTS
from mutants.pruning import PRUNING
from mutants.reused_rows import REUSED_ROWS
from mutants.secrecy import SECRECY
from mutants.server_life import SERVER_LIFE
from mutants.serving import SERVING
from mutants.shared_stores import SHARED_STORES
from mutants.software import SOFTWARE
from mutants.stores import STORES
from mutants.study import STUDY
from mutants.torch_coded import TORCH_CODED
from mutants.trust import TRUST

MUTANTS: tuple[Mutant, ...] = (
    *SOFTWARE,
    *PREDICTED,
    *NATIVE,
    *HARDWARE,
    *TRUST,
    *PROMPTS,
    *SECRECY,
    *STORES,
    *PRUNING,
    *LATER_PROMPTS,
    *FRONTIER,
    *CODED,
    *TORCH_CODED,
    *STUDY,
    *SERVING,
    *PLACEMENT,
    *CATALOGUE,
    *CACHES,
    *HOSTS,
    *LEFT_BEHIND,
    *MAKERS,
    *REUSED_ROWS,
    *SHARED_STORES,
    *SERVER_LIFE,
    *BROKEN_OFF,
)
