# SPDX-License-Identifier: Apache-2.0
"""PYNQ as an execution in front of emulated cards."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from hillinfer_hw.emulation import Engine, build_device_process, make_surrounding
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.toolchain import find_pynq_python
from hillinfer_hw.xrt_installation import debian_xrt
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_pynq.execution import Card, PynqExecution


def emulated_pynq(engine: Engine) -> PynqExecution:
    """Return an execution whose cards are emulated.

    The cards' files are in a temporary folder until this process ends.

    Raises
    ------
    MissingToolError
        Without the front's environment, XRT, or what the device process is built with.
    """
    python = find_pynq_python()
    debian_xrt()
    build_device_process()
    folder = Path(tempfile.mkdtemp(prefix="hillinfer-cards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    @cache
    def card_of(spec: KernelSpec) -> Card:
        surrounding = make_surrounding(spec, engine, folder / spec.digest().hex()[:16])
        # The front finds no module by its variables; the driver below it sleeps less with them.
        variables = surrounding.environment | surrounding.for_process()
        return Card(surrounding.xclbin, PLATFORM, variables)

    return PynqExecution(python, card_of)
