# SPDX-License-Identifier: Apache-2.0
"""What may lie beside an xclbin: variables of the emulation, written by nobody else."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_xclbin import make

from hillinfer.devices.xrt.process import ENVIRONMENT_FILE, environment_of
from hillinfer.devices.xrt.xclbin import HARDWARE
from hillinfer.errors import SettingsError

GOOD = {
    "XCL_EMULATION_MODE": "hw_emu",
    "EMCONFIG_PATH": ".",
    "XRT_INI_PATH": "xrt.ini",
    "XILINX_XRT": "prefix",
    "SDACCEL_EM_RUN_DIR": "runs",
}


@pytest.fixture
def xclbin(tmp_path):
    folder = tmp_path / "card"
    folder.mkdir()
    path = folder / "kernels.xclbin"
    path.write_bytes(make().pack())
    lay(path, json.dumps(GOOD))
    return path


def lay(xclbin, content):
    file = xclbin.with_name(ENVIRONMENT_FILE)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_paths_inside_the_folder_are_taken_and_made_absolute(xclbin, monkeypatch):
    folder = xclbin.parent
    expected = {
        "XCL_EMULATION_MODE": "hw_emu",
        "EMCONFIG_PATH": str(folder),
        "XRT_INI_PATH": f"{folder}/xrt.ini",
        "XILINX_XRT": f"{folder}/prefix",
        "SDACCEL_EM_RUN_DIR": f"{folder}/runs",
    }
    assert environment_of(xclbin) == expected
    monkeypatch.chdir(folder)
    assert environment_of(Path(xclbin.name)) == expected
    lay(xclbin, json.dumps(expected))
    assert environment_of(xclbin) == expected


def test_the_file_counts_for_an_emulated_card_only(xclbin):
    lay(xclbin, "nothing that can be read")
    xclbin.write_bytes(make(mode=HARDWARE).pack())
    assert environment_of(xclbin) == {}


def test_without_the_file_there_are_no_variables(xclbin):
    xclbin.with_name(ENVIRONMENT_FILE).unlink()
    assert environment_of(xclbin) == {}


def test_a_link_leads_to_what_lies_beside_the_image_itself(xclbin, tmp_path):
    link = tmp_path / "link.xclbin"
    link.symlink_to(xclbin)
    (tmp_path / ENVIRONMENT_FILE).write_text("not this one")
    assert environment_of(link)["EMCONFIG_PATH"] == str(xclbin.parent)


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP",
        "PATH", "HOME", "USER", "TMPDIR", "XILINX_VITIS", "XILINX_VIVADO", "XRT_INI_PATH ", "",
        "xcl_emulation_mode", "GCONV_PATH", "BASH_ENV",
    ],
)  # fmt: skip
def test_another_variable_is_refused_with_its_name(xclbin, name):
    lay(xclbin, json.dumps(GOOD | {name: "."}))
    with pytest.raises(SettingsError, match=re.escape(f"sets {name!a}")):
        environment_of(xclbin)


REFUSED = {
    "outside": ({"XILINX_XRT": "/opt/xilinx/xrt"}, "not inside"),
    "above": ({"EMCONFIG_PATH": ".."}, "not inside"),
    "beside, by its first letters": ({"EMCONFIG_PATH": "../card-of-another"}, "not inside"),
    "up and down": ({"XRT_INI_PATH": "a/../../x"}, "not inside"),
    "another mode": ({"XCL_EMULATION_MODE": "sw_emu"}, "not 'hw_emu'"),
    "a zero": ({"EMCONFIG_PATH": "a\0b"}, r"is 'a\\x00b', which no variable can hold"),
    "half a character": ({"XILINX_XRT": "a\ud800b"}, r"is 'a\\ud800b', which no variable can hold"),
    "a mode of half a character": ({"XCL_EMULATION_MODE": "\udfff"}, "which no variable can hold"),
    "long": ({"EMCONFIG_PATH": "a" * 5000}, "no text"),
    "number": ({"EMCONFIG_PATH": 7}, "no text"),
    "none": ({"EMCONFIG_PATH": None}, "no text"),
    "list": (["EMCONFIG_PATH"], "does not hold names and values"),
    "text": ("EMCONFIG_PATH", "does not hold names and values"),
}
UNREADABLE = {
    "cut short": b"{",
    "deep": b"[" * 60_000,
    "deep object": b'{"a":' * 10_000,
    "no UTF-8": b'{"EMCONFIG_PATH": "\xff"}',
    "a name twice": b'{"EMCONFIG_PATH": ".", "EMCONFIG_PATH": ".."}',
    "a number without end": b'{"EMCONFIG_PATH": ' + b"9" * 20_000 + b"}",
    "large": b" " * 70_000,
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_value_is_refused_with_the_reason(xclbin, case):
    content, reason = REFUSED[case]
    lay(xclbin, json.dumps(content))
    with pytest.raises(SettingsError, match=reason) as caught:
        environment_of(xclbin)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_makes_no_sense_is_refused(xclbin, case):
    lay(xclbin, UNREADABLE[case])
    with pytest.raises(SettingsError, match=r"environment\.json") as caught:
        environment_of(xclbin)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022])
@pytest.mark.parametrize("which", ["environment.json", "kernels.xclbin", "."])
def test_what_others_may_have_written_is_refused(xclbin, which, mode):
    path = xclbin.parent / which
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(SettingsError, match=r"others may have written it: .*chmod go-w"):
        environment_of(xclbin)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("which", ["environment.json", "kernels.xclbin", "."])
def test_what_belongs_to_another_user_is_refused(xclbin, which):
    os.chown(xclbin.parent / which, 12345, -1)
    with pytest.raises(SettingsError, match="others may have written it"):
        environment_of(xclbin)


def test_a_place_that_is_no_file_is_refused_without_waiting(xclbin, tmp_path):
    """A pipe would wait for its other end, and a link may lead to what others write."""
    file = xclbin.with_name(ENVIRONMENT_FILE)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(GOOD))
    for make_one in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(elsewhere)):
        file.unlink() if file.is_file() else None
        make_one(file)
        with pytest.raises(SettingsError, match=r"environment\.json"):
            environment_of(xclbin)
        file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_PRELOAD", "PATH"])
def test_nothing_planted_beside_an_xclbin_runs(xclbin, tmp_path, variable):
    """The whole way: doctor's look at an image that a folder from elsewhere holds."""
    planted = xclbin.parent
    told = tmp_path / "it ran"
    (planted / "pyxrt.py").write_text(f"open({str(told)!r}, 'w')\n")
    shutil.copy(planted / "pyxrt.py", planted / "sitecustomize.py")
    lay(xclbin, json.dumps(GOOD | {variable: str(planted)}))
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hillinfer.doctor.cards import xclbin_findings\n"
        "print([one.fix for one in xclbin_findings(Path(sys.argv[1]), None)])\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, xclbin], cwd=planted.parent,
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert f"sets '{variable}'" in said
    assert not told.exists()
