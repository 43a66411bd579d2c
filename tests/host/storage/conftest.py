# SPDX-License-Identifier: Apache-2.0
"""Both ways of reading a drive, for all tests of storage."""

import pytest
from engine_cases import SKIP, kernel_permits_rings

from hillinfer.storage.read_engines import IOChoice


@pytest.fixture(params=[IOChoice.URING, IOChoice.THREADS])
def engine_choice(request):
    if request.param is IOChoice.URING and not kernel_permits_rings():
        pytest.skip(SKIP)
    return request.param
