# SPDX-License-Identifier: Apache-2.0
"""All mutants that the tests must kill."""

from __future__ import annotations

from mutants.benchmarks.frontier import FRONTIER
from mutants.benchmarks.study import STUDY
from mutants.hardware.cards import CARDS
from mutants.hardware.golden_model import GOLDEN
from mutants.hardware.hls import HLS
from mutants.hardware.queries import QUERIES
from mutants.hardware.rtl import RTL
from mutants.mutant import Mutant
from mutants.prompts.later_prompts import LATER_PROMPTS
from mutants.prompts.looked_up import LOOKED_UP
from mutants.prompts.pruned_decoding import PRUNED_DECODING
from mutants.prompts.pruning import PRUNING
from mutants.prompts.reused_prompts import REUSED_PROMPTS
from mutants.prompts.reused_rows import REUSED_ROWS
from mutants.serving.catalogue import CATALOGUE
from mutants.serving.requests import REQUESTS
from mutants.serving.server_life import SERVER_LIFE
from mutants.steps.broken_off import BROKEN_OFF
from mutants.steps.caches import CACHES
from mutants.steps.coded_steps import CODED_STEPS
from mutants.steps.kept_codes import KEPT_CODES
from mutants.steps.native_computing import NATIVE_COMPUTING
from mutants.steps.native_reading import NATIVE_READING
from mutants.steps.passes import PASSES
from mutants.steps.placement import PLACEMENT
from mutants.steps.predicted import PREDICTED
from mutants.steps.rows import ROWS
from mutants.steps.torch_coded import TORCH_CODED
from mutants.stores.hosts import HOSTS
from mutants.stores.left_behind import LEFT_BEHIND
from mutants.stores.makers import MAKERS
from mutants.stores.one_store import ONE_STORE
from mutants.stores.secrecy import SECRECY
from mutants.stores.shared_stores import SHARED_STORES
from mutants.stores.trust import TRUST

MUTANTS: tuple[Mutant, ...] = (
    *FRONTIER,
    *STUDY,
    *CARDS,
    *GOLDEN,
    *HLS,
    *QUERIES,
    *RTL,
    *LATER_PROMPTS,
    *LOOKED_UP,
    *PRUNED_DECODING,
    *PRUNING,
    *REUSED_PROMPTS,
    *REUSED_ROWS,
    *CATALOGUE,
    *SERVER_LIFE,
    *REQUESTS,
    *BROKEN_OFF,
    *CACHES,
    *CODED_STEPS,
    *KEPT_CODES,
    *NATIVE_COMPUTING,
    *NATIVE_READING,
    *PASSES,
    *PLACEMENT,
    *PREDICTED,
    *ROWS,
    *TORCH_CODED,
    *HOSTS,
    *LEFT_BEHIND,
    *MAKERS,
    *SECRECY,
    *SHARED_STORES,
    *ONE_STORE,
    *TRUST,
)
