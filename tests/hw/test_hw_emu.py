# SPDX-License-Identifier: Apache-2.0
"""`make hw_emu`: who emulates the card, with programs in place of Vitis and of generating."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from vitis_place import ROOT, VitisPlace, tool_main

from hillinfer.devices.xrt.process import environment_of
from hillinfer.devices.xrt.xclbin import HW_EMU, Xclbin, check_xclbin
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.own_emulator import OwnEmulator
from hillinfer_hw.surrounding import Surrounding
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.xrt_installation import debian_xrt
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import preset_spec

STEM = "smollm2-135m-int4-weight_sum"
NAME = f"{STEM}-hls-hw_emu"
SPEC = preset_spec("smollm2-135m", KeyMode.INT4, Rule.WEIGHT_SUM)
HLS = ("--engine", "hls")
REPORT = {
    "prompt_tokens": 442,
    "new_tokens": 2,
    "scored_tokens": 900,
    "device_scored_tokens": 800,
    "device_lost": False,
    "kernel_launches": 30,
    "device_scored_segments": 150,
    "device_read_bytes": 4096,
    "make_shadow_launches": 3,
    "shared_launches": 2,
    "cold_rows_read": 70,
}


class Generations:
    """Stands in for `hillinfer generate`: records how it is called and leaves a report."""

    def __init__(self):
        self.calls = []
        self.tokens = {"xrt": [5, 7], "nvme": [5, 7]}
        self.report = REPORT

    def __call__(self, command, environment):
        assert (command[0], command[3]) == (sys.executable, "generate")
        options = dict(zip(command[4::2], command[5::2], strict=True))
        assert Path(options["--prompt-file"]).read_text()
        self.calls.append((options, environment))
        tokens = self.tokens[options["--device"]]
        report = self.report | {"answers": [{"token_ids": tokens}]}
        Path(options["--report"]).write_text(json.dumps(report))
        log = environment.get("HILLINFER_EMULATION_LOG")
        if log and options["--device"] == "xrt":
            with Path(log).open("a") as file:
                file.write('{"launches": 20, "cycles": 7000}\n{"launches": 3, "cycles": 500}\n')


class Place(VitisPlace):
    """With an XRT beside the Vitis, as a shell has it that sourced both."""

    def __init__(self, folder, monkeypatch):
        super().__init__(folder, monkeypatch)
        self.build, self.out = folder / "build", folder / "hw_emu.json"
        self.xrt = folder / "xrt"
        (self.xrt / "python").mkdir(parents=True)
        (self.xrt / "python" / "pyxrt.py").write_text("")
        (self.xrt / "version.json").write_text('{"BUILD_VERSION": "2.14.354"}')
        self.vitis = {
            "XILINX_XRT": str(self.xrt),
            "XILINX_VITIS": "/tools/Vitis/2022.2",
            "LD_LIBRARY_PATH": f"{self.xrt}/lib",
            "PATH": os.environ["PATH"],
        }
        for name, value in self.vitis.items():
            monkeypatch.setenv(name, value)
        for name in ("XILINX_VIVADO", "XCL_EMULATION_MODE", "EMCONFIG_PATH"):
            monkeypatch.delenv(name, raising=False)
        self.generations = Generations()

    def run(self, *options, fault="", make_own=OwnEmulator):
        self.monkeypatch.setenv("STANDIN_FAULT", fault)
        given = ["--build", str(self.build), "--out", str(self.out), *options]
        return tool_main("hw_emu")(given, self.generations, make_own)

    def report(self):
        return json.loads(self.out.read_text())

    def nothing_ran(self):
        return not self.calls() and not self.generations.calls and not self.out.exists()


@pytest.fixture
def place(tmp_path, monkeypatch):
    return Place(tmp_path, monkeypatch)


def test_with_vitis_on_the_path_its_tools_build_the_card(place):
    assert place.run(*HLS) == 0
    stages = [call[:2] for call in place.calls()]
    assert stages == [
        ["v++", "-c"],
        ["v++", "-c"],
        ["v++", "-l"],
        ["v++", "-p"],
        ["emconfigutil", "--platform"],
        ["xclbinutil", "--force"],
    ]
    for call in place.calls()[:4]:
        assert call[call.index("-t") + 1] == "hw_emu"
    for call in place.calls()[:5]:
        assert call[call.index("--platform") + 1] == str(place.platform)
    folder = place.build / "hw_emu" / NAME
    assert sorted(path.name for path in folder.iterdir()) == [
        "emconfig.json",
        "environment.json",
        "setup.sh",
        f"{NAME}.json",
        f"{NAME}.xclbin",
    ]
    xclbin = Xclbin.read(folder / f"{NAME}.xclbin")
    assert xclbin.mode == HW_EMU
    check_xclbin(xclbin, SPEC, PLATFORM, NAME)


def test_rtl_kernels_are_built_first_and_both_are_in_the_report(place):
    pytest.importorskip("tkinter", reason="the stand-in runs Tcl: apt-get install python3-tk")
    assert place.run() == 0
    programs = [call[0] for call in place.calls()]
    rest = ["v++", "v++", "emconfigutil", "xclbinutil"]
    assert programs == ["vivado", "vivado", *rest, "v++", "v++", *rest]
    assert [row["engine"] for row in place.report()["rows"]] == ["rtl", "hls"]
    used = [options.get("--xclbin") for options, _ in place.generations.calls]
    names = [name and Path(name).name for name in used]
    assert names == [f"{STEM}-rtl-hw_emu.xclbin", None, f"{NAME}.xclbin", None]


def test_what_the_host_finds_beside_the_xclbin_leads_to_the_card(place):
    assert place.run(*HLS) == 0
    folder = place.build / "hw_emu" / NAME
    assert environment_of(folder / f"{NAME}.xclbin") == {
        "XCL_EMULATION_MODE": "hw_emu",
        "EMCONFIG_PATH": str(folder),
    }


def test_what_a_shell_sources_beside_the_xclbin_leads_to_vitis(place):
    assert place.run(*HLS) == 0
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    setup = place.build / "hw_emu" / NAME / "setup.sh"
    script = f". {setup}; {sys.executable} -I -c '{show}'"
    fresh = {"PATH": "/usr/bin", "PYTHONPATH": "/own"}
    said = subprocess.run(["/bin/sh", "-c", script], env=fresh, capture_output=True, check=True)
    found = json.loads(said.stdout)
    assert found["PYTHONPATH"] == f"{place.xrt / 'python'}:/own"
    assert found["PATH"] == f"{place.vitis['PATH']}:/usr/bin"
    for name in ("XILINX_XRT", "XILINX_VITIS", "LD_LIBRARY_PATH"):
        assert found[name] == place.vitis[name]


def test_the_generations_differ_in_the_device_only(place):
    assert place.run(*HLS, "--new-tokens", "2", "--characters", "99") == 0
    (card, first), (plain, second) = place.generations.calls
    folder = place.build / "hw_emu" / NAME
    assert card.pop("--xclbin") == str(folder / f"{NAME}.xclbin")
    assert (card.pop("--device"), plain.pop("--device")) == ("xrt", "nvme")
    assert card.pop("--report") != plain.pop("--report")
    assert card == plain
    assert card["--max-new-tokens"] == "2"
    assert (card["--shadow"], card["--rule"]) == ("int4", "weight_sum")
    for environment in (first, second):
        assert environment["XCL_EMULATION_MODE"] == "hw_emu"
        assert environment["EMCONFIG_PATH"] == str(folder)
        assert environment["XILINX_VITIS"] == place.vitis["XILINX_VITIS"]
    assert "XCL_EMULATION_MODE" not in os.environ


def test_the_report_of_vitis_says_what_it_knows(place):
    assert place.run(*HLS) == 0
    found = place.report()
    wall = found["wall_seconds"]
    (row,) = found.pop("rows")
    assert found == {
        "label": "hw_emu (real XRT, Vitis' emulation)",
        "emulator": "vitis",
        "xrt_version": "2.14.354",
        "kernel_launches": 30,
        "simulated_cycles": None,
        "prompt_tokens": 442,
        "new_tokens": 2,
        "segments_per_launch": 5.0,
        "p2p_bytes": 4096,
        "make_shadow_launches": 3,
        "tokens_equal": True,
        "wall_seconds": wall,
    }
    assert (row["engine"], row["simulator"], row["execution"]) == ("hls", "xsim", "hw_emu")
    assert (row["device_scored_tokens"], row["scored_tokens"]) == (800, 900)
    assert row["shared_launches"] == 2


def test_tokens_that_differ_are_a_failure(place):
    place.generations.tokens["xrt"] = [5, 8]
    assert place.run(*HLS) == 1
    assert place.report()["tokens_equal"] is False


def test_a_card_that_scored_nothing_is_a_failure(place):
    place.generations.report = REPORT | {"device_scored_tokens": 0}
    assert place.run(*HLS) == 1


def test_a_card_that_was_lost_on_the_way_is_a_failure(place):
    place.generations.report = REPORT | {"device_lost": True}
    assert place.run(*HLS) == 1


@pytest.mark.parametrize("missing", ["make_shadow_launches", "device_read_bytes"])
def test_a_card_that_made_no_shadow_of_a_long_document_is_a_failure(place, missing):
    place.generations.report = REPORT | {"prompt_tokens": 5000}
    assert place.run(*HLS) == 0
    place.generations.report = REPORT | {"prompt_tokens": 5000, missing: 0}
    assert place.run(*HLS) == 1
    # Of a short one there is none to be made.
    place.generations.report = REPORT | {missing: 0}
    assert place.run(*HLS) == 0


def test_a_card_that_casts_keys_makes_no_shadow(place):
    """The plain drive has the codes that the card makes on the fly."""
    long = REPORT | {"prompt_tokens": 5000, "make_shadow_launches": 0}
    place.generations.report = long
    assert place.run(*HLS, "--mode", "fp16") == 0
    used = [(one["--device"], one["--shadow"]) for one, _ in place.generations.calls]
    assert used == [("xrt", "fp16"), ("nvme", "int8")]
    # But it is given rows.
    place.generations.report = long | {"device_read_bytes": 0}
    assert place.run(*HLS, "--mode", "fp16") == 1


def test_a_build_that_fails_says_why_and_generates_nothing(place, capsys):
    assert place.run(*HLS, fault="compile") == 1
    message = capsys.readouterr().err
    assert "hw_emu: failed: compile_score_tokens" in message
    assert "ERROR: [v++ 207-3776]" in message
    assert not place.generations.calls


def test_a_missing_platform_is_told_and_nothing_else_emulates(place, capsys):
    place.monkeypatch.setenv("PLATFORM_REPO_PATHS", "")
    assert place.run() == 2
    message = capsys.readouterr().err
    assert "hw_emu: Vitis cannot emulate a card:\n- the platform" in message
    assert f"the platform {PLATFORM} is not installed" in message
    assert "is not on PATH" not in message
    assert place.nothing_ran()


def test_all_that_is_missing_is_told_before_anything_is_built(place, capsys):
    (place.programs / "emconfigutil").unlink()
    (place.programs / "vivado").unlink()
    place.monkeypatch.delenv("XILINX_XRT")
    assert place.run() == 2
    message = capsys.readouterr().err
    for line in ("emconfigutil is not on PATH", "vivado is not on PATH", "XILINX_XRT is not set"):
        assert f"- {line}" in message
    assert place.nothing_ran()


def test_a_pyxrt_that_cannot_be_had_is_told_before_anything_is_built(place, capsys):
    if importlib.util.find_spec("pyxrt"):
        pytest.skip("this interpreter has a pyxrt of its own")
    (place.xrt / "python" / "pyxrt.py").unlink()
    assert place.run(*HLS) == 2
    assert f"{place.xrt} is no whole XRT" in capsys.readouterr().err
    assert place.nothing_ran()


def test_vitis_that_is_asked_for_and_not_there_is_told(place, capsys):
    (place.programs / "v++").unlink()
    assert place.run(*HLS, "--emulator", "vitis") == 2
    assert "v++ is not on PATH" in capsys.readouterr().err
    assert place.nothing_ran()


def test_a_path_that_vitis_cannot_work_with_is_told(place, capsys, tmp_path):
    place.build = tmp_path / "my build"
    assert place.run(*HLS) == 2
    assert "it has a space" in capsys.readouterr().err
    assert place.nothing_ran()


@pytest.mark.parametrize("asked", ["own", "auto"])
def test_the_own_emulator_counts_launches_and_cycles(place, tmp_path, asked):
    if asked == "auto":
        (place.programs / "v++").unlink()
    made = []

    def make(spec, engine, folder):
        made.append((spec, engine.value, folder))
        folder.mkdir(parents=True)
        return Surrounding(
            folder,
            folder / "kernels.xclbin",
            {"XRT_INI_PATH": "not for the host"},
            {"LD_PRELOAD": "for the worker"},
        )

    xrt = type("Xrt", (), {"version": "2.13.0"})
    own = partial(OwnEmulator, make=make, find_xrt=lambda: xrt)
    assert place.run("--emulator", asked, make_own=own) == 0
    folder = place.build / "hw_emu"
    assert made == [(SPEC, engine, folder / f"{STEM}-{engine}") for engine in ("rtl", "hls")]
    assert place.calls() == []
    found = place.report()
    assert (found["emulator"], found["xrt_version"]) == ("own", "2.13.0")
    assert (found["kernel_launches"], found["simulated_cycles"]) == (23, 7500)
    assert [row["simulator"] for row in found["rows"]] == ["verilator", "g++"]
    options, environment = place.generations.calls[0]
    assert options["--xclbin"] == str(folder / f"{STEM}-rtl" / "kernels.xclbin")
    assert not {"XCL_EMULATION_MODE", "XRT_INI_PATH"} & (set(environment) - set(os.environ))
    assert environment["LD_PRELOAD"].split(":")[0] == "for the worker"


def test_one_row_that_differs_is_seen_above_the_rows(place):
    pytest.importorskip("tkinter", reason="the stand-in runs Tcl: apt-get install python3-tk")
    answers = iter([[5, 7], [5, 7], [5, 8], [5, 7]])
    place.generations.tokens = type("Next", (), {"__getitem__": lambda *_: next(answers)})()
    assert place.run() == 1
    found = place.report()
    assert [row["tokens_equal"] for row in found["rows"]] == [True, False]
    assert found["tokens_equal"] is False


def install_xrt(place, *given):
    """Run tools/install_xrt.sh on a machine where no package is missing.

    Returns what it said and the packages that it asked for.
    """
    asked = place.programs / "asked"
    package = place.programs / "dpkg-query"
    package.write_text(f'#!/bin/sh\necho "$3" >>{asked}\necho "install ok installed"\n')
    package.chmod(0o755)
    command = ["/bin/sh", str(ROOT / "tools" / "install_xrt.sh"), *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout, asked.read_text().split() if asked.exists() else []


@pytest.mark.parametrize("given", [(), ("auto",), ("vitis",)])
def test_with_vitis_no_packages_are_asked_for(place, given):
    said, asked = install_xrt(place, *given)
    assert said.count("\n") == 1
    assert str(place.xrt) in said
    assert asked == []


def test_without_vitis_or_for_the_own_emulator_packages_are_asked_for(place):
    said, asked = install_xrt(place, "own")
    assert said == ""
    assert "libxrt1" in asked
    (place.programs / "asked").unlink()
    (place.programs / "v++").unlink()
    assert install_xrt(place, "auto", "python3") == ("", asked)


@pytest.mark.parametrize(
    ("headers", "packages"),
    [("/usr/include/python9.9", ["python9.9-dev"]), ("/opt/python9.9/include", [])],
    ids=["debians-python", "another-python"],
)
def test_headers_are_asked_for_where_debians_interpreter_lacks_them(place, headers, packages):
    python = place.programs / "python9.9"
    python.write_text(f"#!/bin/sh\necho {headers}\n")
    python.chmod(0o755)
    _, asked = install_xrt(place, "own", str(python))
    assert [one for one in asked if one.endswith("-dev") and "python" in one] == packages


def test_headers_that_are_there_are_not_asked_for(place):
    _, asked = install_xrt(place, "own", sys.executable)
    assert not any("python" in one for one in asked)


@pytest.mark.model
@pytest.mark.xdist_group(SPEC.digest().hex())
@pytest.mark.parametrize("engine", ["rtl", "hls"])
def test_the_real_model_generates_the_same_tokens_behind_the_real_xrt(
    engine, tmp_path, smollm2_folder
):
    """All of it real: what `make hw_emu` does, with fewer tokens."""
    try:
        debian_xrt()
    except MissingToolError as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    out = tmp_path / "hw_emu.json"
    given = ["--emulator", "own", "--new-tokens", "2", "--characters", "1200", "--engine", engine]
    assert tool_main("hw_emu")([*given, "--build", str(tmp_path), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["tokens_equal"]
    (row,) = report["rows"]
    assert row["engine"] == engine
    if engine == "rtl":
        assert row["simulated_cycles"] > 0
    assert row["new_tokens"] == 2
    assert row["prompt_tokens"] > 300
    # A launch for each layer and decode step.
    assert row["kernel_launches"] == 30
    assert 0 < row["device_scored_tokens"] < row["scored_tokens"]
