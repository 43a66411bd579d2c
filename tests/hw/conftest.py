# SPDX-License-Identifier: Apache-2.0
"""Real keys for launches, and the hardware's tools on the path."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))


@pytest.fixture(scope="session")
def recorded_layer(smollm2_folder):
    """One layer of the real model reading real text: FP16 keys (N, 3, 64), a query, the scaling."""
    from recorded import record_layer

    return record_layer(smollm2_folder)
