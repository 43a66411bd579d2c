# SPDX-License-Identifier: Apache-2.0
"""Emulated cards, for tests behind the real XRT."""

import os

import pytest

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

    def __init__(self, spec, make_folder):
        self._spec = spec
        self._make_folder = make_folder
        self._made = {}

    def __call__(self, engine: Engine) -> Surrounding:
        if engine not in self._made:
            try:
                folder = self._make_folder("card") / engine.value
                self._made[engine] = make_surrounding(self._spec, engine, folder)
            except MissingToolError as error:
                if os.environ.get("CI"):
                    raise
                pytest.skip(str(error))
        return self._made[engine]
