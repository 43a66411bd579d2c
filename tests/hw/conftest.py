# SPDX-License-Identifier: Apache-2.0
"""Real keys for launches, and the hardware's tools on the path."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))

# Files whose tests compile kernels, simulate them for long or ask solvers: `make test-kernels`.
_LONG = {
    "test_cocotb.py",
    "test_csim.py",
    "test_cycle_model_rtl.py",
    "test_formal.py",
    "test_proofs.py",
    "test_rtl_kernel.py",
    "test_score_core.py",
    "test_shadow_core.py",
    "test_synth.py",
}
# Of the executions that compile, `make test` runs one kernel each.
_COMPILED = ("[csim-", "[rtl-")
_SHORT = ("[csim-two-heads-int4-weight_sum-", "[rtl-half-beat-int4-weight_sum-")


def pytest_collection_modifyitems(items):
    for item in items:
        compiled = any(name in item.nodeid for name in _COMPILED)
        short = any(name in item.nodeid for name in _SHORT)
        if item.path.name in _LONG or (compiled and not short):
            item.add_marker(pytest.mark.kernels)


@pytest.fixture(scope="session")
def recorded_layer(smollm2_folder):
    """One layer of the real model reading real text: FP16 keys (N, 3, 64), a query, the scaling."""
    from recorded import record_layer

    return record_layer(smollm2_folder)
