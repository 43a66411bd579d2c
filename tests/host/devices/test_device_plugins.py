# SPDX-License-Identifier: Apache-2.0
"""Devices that other packages bring: found by their entry point, or named with the fix."""

import zlib

import pytest

from hillinfer.devices.opening import PLUGIN_GROUP, GoldenScorer, make_scorer
from hillinfer.errors import SettingsError
from hillinfer_model.choices import Scope
from hillinfer_model.kernel_spec import KernelSpec

SPEC = KernelSpec(16, 1, 1)
OPENS = """
from hillinfer.devices.opening import GoldenScorer

def open_toy(spec, scope, *_):
    return GoldenScorer(spec, scope)
"""


@pytest.fixture
def module(request):
    """The name of the toy's module: a module of each name is imported once."""
    return f"toy_device_{zlib.crc32(request.node.name.encode()):x}"


@pytest.fixture
def installed(tmp_path, monkeypatch, module):
    """Put a package `hillinfer-toy` where Python finds packages."""

    def install(code):
        (tmp_path / f"{module}.py").write_text(code)
        facts = tmp_path / "hillinfer_toy-1.0.dist-info"
        facts.mkdir()
        said = "Metadata-Version: 2.1\nName: hillinfer-toy\nVersion: 1.0\n"
        (facts / "METADATA").write_text(said)
        (facts / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\ntoy = {module}:open_toy\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def opened(device, **given):
    return make_scorer(device, SPEC, Scope.LAYER, **given)


def test_a_package_brings_a_device(installed):
    with pytest.raises(SettingsError, match=r"'toy' is unknown: choose one of nvme, .*xrt, pynq"):
        opened("toy")
    installed(OPENS)
    assert type(opened("toy")) is GoldenScorer
    with pytest.raises(SettingsError, match=r"'none' is unknown: choose one of nvme, .*toy"):
        opened("none")


def test_a_package_takes_no_device_of_the_hosts(installed):
    installed(OPENS.replace("return", "raise AssertionError"))
    assert type(opened("golden")) is GoldenScorer


def test_a_known_package_that_is_missing_is_named_with_the_fix():
    known = {"toy": ("hillinfer-toy", "plugins/toy")}
    with pytest.raises(SettingsError, match=r"package hillinfer-toy: pip install \./plugins/toy"):
        opened("toy", plugins=known)


@pytest.mark.parametrize("code", ["import no_such_module\n", "open_other = None\n"])
def test_a_package_that_cannot_be_loaded_is_named(installed, module, code):
    installed(code)
    with pytest.raises(SettingsError, match=f"{module}:open_toy cannot be loaded"):
        opened("toy")
