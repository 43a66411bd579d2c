# SPDX-License-Identifier: Apache-2.0
"""What the device `pynq` needs: each thing that is missing is named with its fix."""

import json
from dataclasses import replace

import pytest
from launch_cases import random_launch
from made_xclbin import SPEC, make

from hillinfer.devices.opening import make_scorer
from hillinfer.devices.xrt.process import ENVIRONMENT_FILE
from hillinfer.devices.xrt.xclbin import XclbinError
from hillinfer.errors import DeviceError, SettingsError
from hillinfer.settings import DeviceOptions, Settings
from hillinfer_model.choices import Scope
from hillinfer_pynq.front_process import PynqError
from hillinfer_pynq.open_pynq import VARIABLE, PynqLaunches, pynq_python


def program(path, script="exit 3"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XILINX_XRT", "/opt/xilinx/xrt")


@pytest.fixture
def options(tmp_path):
    xclbin = tmp_path / "kernels.xclbin"
    xclbin.write_bytes(make().pack())
    return DeviceOptions(xclbin=xclbin, pynq_python=program(tmp_path / "python"))


def opening(options, spec=SPEC):
    return make_scorer("pynq", spec, Scope.LAYER, options)


def test_the_interpreter_is_the_chosen_one_then_the_variables_then_the_trees(tmp_path):
    chosen, other, made = (program(tmp_path / name / "python") for name in ("a", "b", "c"))
    assert pynq_python(chosen, {VARIABLE: str(other)}, made) == chosen
    assert pynq_python(None, {VARIABLE: str(other)}, made) == other
    assert pynq_python(None, {VARIABLE: ""}, made) == made
    assert pynq_python(None, {}, made) == made


def test_an_environments_interpreter_is_taken_by_its_own_name(tmp_path, monkeypatch):
    """It is a link, and what it leads to is not the environment; the front works elsewhere."""
    link = tmp_path / "environment" / "python"
    link.parent.mkdir()
    link.symlink_to(program(tmp_path / "python3"))
    monkeypatch.chdir(tmp_path)
    assert pynq_python(link.relative_to(tmp_path), {}) == link


@pytest.mark.parametrize("named", ["nothing", "folder", "text"])
def test_an_interpreter_that_is_none_is_named_with_the_fix(tmp_path, named, options):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(SettingsError, match=f"{named} is none: `make pynq-env`.*--pynq-python"):
        opening(replace(options, pynq_python=tmp_path / named))


def test_no_xclbin_is_an_error_that_names_the_fix():
    with pytest.raises(SettingsError, match=r"device=pynq needs the image.*--xclbin FILE"):
        opening(DeviceOptions())


def test_without_xrt_the_way_to_it_is_named(options, monkeypatch):
    monkeypatch.delenv("XILINX_XRT")
    with pytest.raises(SettingsError, match=r"source /opt/xilinx/xrt/setup\.sh"):
        opening(options)


def test_an_xclbin_of_another_spec_is_refused(options):
    with pytest.raises(XclbinError, match="head_dim=64 instead of 80"):
        opening(options, replace(SPEC, head_dim=80))


def test_a_front_that_does_not_start_is_an_error_with_its_words(options):
    """It gets the variables beside the xclbin."""
    program(options.pynq_python, 'echo "no card for $EMCONFIG_PATH" >&2; exit 3')
    file = options.xclbin.with_name(ENVIRONMENT_FILE)
    file.write_text(json.dumps({"EMCONFIG_PATH": "somewhere"}))
    said = r"device=pynq: the PYNQ front could not load the card: .*\nno card for /.*/somewhere"
    with pytest.raises(SettingsError, match=said):
        opening(options)


@pytest.mark.parametrize("error", [PynqError("front"), XclbinError("file"), OSError(28, "full")])
def test_what_fails_in_a_launch_loses_the_device(error):
    class Failing:
        def score(self, spec, launch):
            raise error

    launch = random_launch(SPEC, Scope.LAYER, [64])
    with pytest.raises(DeviceError, match=str(error.args[-1])):
        PynqLaunches(Failing()).score(SPEC, launch)


def test_settings_lead_to_the_device(options):
    given = Settings().changed(
        device="pynq", xclbin=str(options.xclbin), pynq_python=str(options.pynq_python)
    )
    assert given.device_options == options
