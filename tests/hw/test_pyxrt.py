# SPDX-License-Identifier: Apache-2.0
"""The module pyxrt that is built where XRT has none: its public surface is that of XRT's own."""

import os
import subprocess
import sys

import pytest
from emulated_cards import ONE_PROCESS
from vitis_place import tool

from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.xrt_installation import debian_xrt

pytestmark = ONE_PROCESS
# What XRT's own module has of what programs call (XRT 2.13, src/python/pybind11).
SURFACE = {
    "bo": {"normal", "cacheable", "p2p", "write", "read", "sync", "map", "size", "address"},
    "device": {"load_xclbin", "get_xclbin_uuid", "get_info"},
    "ert_cmd_state": {"ERT_CMD_STATE_COMPLETED", "ERT_CMD_STATE_RUNNING"},
    "kernel": {"group_id", "__call__"},
    "run": {"start", "set_arg", "wait", "state"},
    "uuid": {"to_string"},
    "xclBOSyncDirection": {"XCL_BO_SYNC_BO_TO_DEVICE", "XCL_BO_SYNC_BO_FROM_DEVICE"},
    "xclbin": {"get_xsa_name", "get_uuid", "get_kernels", "get_mems"},
    "xrt_info_device": {"bdf", "name"},
}


def asked(folder, program):
    lead = {"PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | lead, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_module_has_the_surface_of_xrts_own(tmp_path):
    try:
        debian_xrt()
    except MissingToolError as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    said = tool("build_pyxrt").install({}, tmp_path)
    assert said.startswith("built for XRT 2."), said
    found = asked(tmp_path, "import pyxrt; print(pyxrt.__file__)")
    assert found.stdout.startswith(str(tmp_path)), found.stderr
    for name, members in SURFACE.items():
        has = asked(tmp_path, f"import pyxrt; print(*dir(pyxrt.{name}))")
        assert members <= set(has.stdout.split()), (name, has.stderr)


def test_without_headers_it_says_what_is_missing(tmp_path):
    (tmp_path / "version.json").write_text('{"BUILD_VERSION": "2.14.354"}')
    said = tool("build_pyxrt").install({"XILINX_XRT": str(tmp_path)}, tmp_path)
    assert said.startswith("not built")
    assert "headers are missing" in said
    assert not list(tmp_path.glob("pyxrt*"))
