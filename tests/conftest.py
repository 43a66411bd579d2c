# SPDX-License-Identifier: Apache-2.0
"""What every room's tests share."""

import sys
from pathlib import Path

import pytest

# Tables of cases lie beside the rooms that use them and are imported by name.
for room in ("host", "sw_model"):
    sys.path.insert(0, str(Path(__file__).parent / room))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Output bits depend on the number of threads, and test runs share the machine."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cold_dir(tmp_path_factory):
    """A directory for cold pools, on whatever drive holds pytest's temporary directory."""
    return tmp_path_factory.mktemp("cold")
