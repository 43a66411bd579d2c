# SPDX-License-Identifier: Apache-2.0
"""The AXI ports of a kernel, as the RTL names them, and what is reached by them."""

from __future__ import annotations

from hillinfer_hw.rtl_files import BUNDLES

CONTROL_PORT = "s_axi_control"
# Bytes of the control port's registers.
REGISTER_RANGE = 0x1000


def memory_port(kernel: str, argument: str) -> str:
    """Return the port of a pointer's memory: keys, what else is read, or what is written."""
    return f"m_axi_{_bundle_of(kernel, argument)}"


def _bundle_of(kernel: str, argument: str) -> str:
    if argument == ("shadow" if kernel == "score_tokens" else "rows"):
        return BUNDLES[0]
    written = ("scores", "status") if kernel == "score_tokens" else ("shadow", "status")
    return BUNDLES[2] if argument in written else BUNDLES[1]
