# SPDX-License-Identifier: Apache-2.0
"""Emulated cards, for tests behind the real XRT."""

import os
import shutil

import pytest

from hillinfer.devices.xrt.process import ENVIRONMENT_FILE
from hillinfer_hw.emulation import Engine, Surrounding, make_surrounding
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec

SMALL = KernelSpec(
    64, 2, 1, key_mode=KeyMode.INT8, rule=Rule.RAW_SUM, segment_tokens=512, block_tokens=64
)
# Tests of one spec run in one process, so that its kernels are built once.
ONE_PROCESS = pytest.mark.xdist_group(SMALL.digest().hex())


class EmulatedCards:
    """Makes the surrounding of an engine, once; a test that needs one is skipped without XRT.

    In CI it fails instead: all of XRT can be installed there.
    """

    def __init__(self, spec, make_folder, set_variable):
        self._set_variable = set_variable
        self._spec = spec
        self._make_folder = make_folder
        self._made = {}

    def __call__(self, engine: Engine) -> Surrounding:
        if engine not in self._made:
            try:
                folder = self._make_folder("card") / engine.value
                made = self._made[engine] = make_surrounding(self._spec, engine, folder)
                # As a shell has them that sourced setup.sh.
                for name, value in made.for_process().items():
                    self._set_variable(name, value)
            except MissingToolError as error:
                if os.environ.get("CI"):
                    raise
                pytest.skip(str(error))
        return self._made[engine]


def surround(folder, surrounding):
    """Give another folder what a surrounding has beside its xclbin."""
    for beside in surrounding.folder.iterdir():
        own = folder / beside.name
        if beside.name == ENVIRONMENT_FILE:
            # A link would not be followed.
            shutil.copy(beside, own)
        elif beside != surrounding.xclbin and not own.exists():
            own.symlink_to(beside)
