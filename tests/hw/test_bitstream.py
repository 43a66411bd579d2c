# SPDX-License-Identifier: Apache-2.0
"""The Vitis flow from end to end, with programs in place of Vitis that check their arguments."""

import hashlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from vitis_place import VitisPlace, tool_main

from hillinfer.devices.xrt.xclbin import Xclbin, XclbinError, check_xclbin
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.rtl_files import arguments
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.verilate import verilator_bin
from hillinfer_hw.vitis_build import (
    KernelSource,
    Target,
    VitisBuild,
    VitisBuildError,
)
from hillinfer_hw.vitis_flow import flow_steps
from hillinfer_hw.vitis_run import BuildFailedError, run_steps
from hillinfer_hw.vitis_sources import rtl_sources, write_sources
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.hardware_spec import HardwareSpecError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.presets import preset_spec

ROOT = Path(__file__).resolve().parents[2]
NAME = "smollm2-135m-int4-weight_sum-hls"
SPEC = preset_spec("smollm2-135m", KeyMode.INT4, Rule.WEIGHT_SUM)


class Place(VitisPlace):
    """With folders to build in and to publish to."""

    def __init__(self, folder, monkeypatch):
        super().__init__(folder, monkeypatch)
        self.build, self.out = folder / "build", folder / "bitstreams"

    def run(self, *options, fault=""):
        self.monkeypatch.setenv("STANDIN_FAULT", fault)
        return tool_main("bitstream")(
            ["--build", str(self.build), "--out", str(self.out), *options]
        )

    def published(self):
        return sorted(path.name for path in self.out.iterdir()) if self.out.is_dir() else []

    def manifest(self, name=NAME):
        return json.loads((self.out / f"{name}.json").read_text())


@pytest.fixture
def place(tmp_path, monkeypatch):
    return Place(tmp_path, monkeypatch)


def test_the_whole_flow_leaves_an_xclbin_that_the_host_accepts(place, capsys):
    assert place.run() == 0
    assert place.published() == [f"{NAME}.json", f"{NAME}.xclbin"]
    path = place.out / f"{NAME}.xclbin"
    check_xclbin(Xclbin.read(path), SPEC, PLATFORM, str(path))
    other = preset_spec("smollm2-135m", KeyMode.INT2, Rule.WEIGHT_SUM)
    with pytest.raises(XclbinError, match="key_mode='int4' instead of 'int2'"):
        check_xclbin(Xclbin.read(path), other, PLATFORM, str(path))
    stages = [call[:2] for call in place.calls()]
    assert stages == [
        ["v++", "-c"],
        ["v++", "-c"],
        ["v++", "-l"],
        ["v++", "-p"],
        ["xclbinutil", "--force"],
    ]
    assert "[link] v++ -l" in capsys.readouterr().out
    assert "Run vpl: Step impl" in (place.build / NAME / "logs" / "link.log").read_text()


def test_the_manifest_says_what_was_built_and_how(place):
    assert place.run() == 0
    found = place.manifest()
    assert found["spec_hash"] == SPEC.digest().hex()
    assert found["spec"]["head_dim"] == 64
    assert found["contract_version"] == 1
    assert (found["kernels"], found["target"], found["platform"]) == ("hls", "hw", PLATFORM)
    assert found["instances"] == ["score_tokens:score_tokens_1", "make_shadow:make_shadow_1"]
    assert found["tools"] == {
        "v++": "v++ v2022.2 (64-bit)",
        "xclbinutil": "XRT Build Version: 2.14.354 (2022.2)",
    }
    assert found["frequency"] == {
        "asked_mhz": 300,
        "clock_mhz": 300,
        "setup_slack_ns": 0.012,
        "hold_slack_ns": 0.01,
    }
    assert found["hls"]["score_tokens"]["estimated_clock_ns"] == 2.433
    assert found["hls"]["score_tokens"]["latency_cycles"] == [None, None]
    assert found["hls"]["score_tokens"]["loops"] == [
        {"module": "dot_shadow", "loop": "dot_rounds", "interval": 1}
    ]
    assert found["utilisation"]["lut"] == {"used": 196411, "available": 522720, "share": 0.3757}
    assert found["utilisation"]["bram"]["used"] == 311.5
    assert found["kernel_utilisation"]["score_tokens_1"]["lut"] == 62304
    content = (place.out / found["xclbin"]["file"]).read_bytes()
    assert found["xclbin"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert found["warnings"] == []
    assert [shlex.split(line) for line in found["commands"]] == place.calls()


def test_other_frequencies_platforms_and_modes_reach_the_tools(place):
    options = ("--mode", "fp16", "--frequency", "250", "--platform", str(place.platform))
    assert place.run(*options) == 0
    name = NAME.replace("int4", "fp16")
    folder = place.build / name
    assert "kernel_frequency=250\n" in (folder / "cfg" / "link.cfg").read_text()
    assert "kernel_frequency=250\n" in (folder / "cfg" / "compile_score_tokens.cfg").read_text()
    found = place.manifest(name)
    assert found["instances"] == ["score_tokens:score_tokens_1"]
    assert found["frequency"]["clock_mhz"] == 250
    assert all(str(place.platform) in call for call in place.calls() if call[0] == "v++")


def test_rtl_kernels_are_packaged_by_vivado(place):
    pytest.importorskip("tkinter", reason="the stand-in runs Tcl: apt-get install python3-tk")
    assert place.run("--kernels", "rtl") == 0
    name = NAME.replace("hls", "rtl")
    assert [call[0] for call in place.calls()] == [
        *("vivado", "vivado", "v++", "v++", "xclbinutil"),
    ]
    found = place.manifest(name)
    assert (found["kernels"], found["hls"], found["warnings"]) == ("rtl", {}, [])
    assert found["tools"]["vivado"] == "Vivado v2022.2 (64-bit)"


@pytest.mark.parametrize("kernel", ["score_tokens", "make_shadow"])
def test_the_verilog_top_is_connected_to_the_rtl(kernel, tmp_path):
    try:
        binaries = verilator_bin()
    except MissingToolError as missing:
        pytest.skip(str(missing))
    sources = rtl_sources(SPEC, kernel)

    def complaints(top):
        files = []
        for name, text in {**sources, f"{kernel}.v": top}.items():
            files.append(tmp_path / name)
            files[-1].write_text(text)
        command = [binaries / "verilator", "--lint-only", "-Wno-fatal", "--top-module", kernel]
        done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        assert "%Error" not in done.stderr
        return [line for line in done.stderr.splitlines() if f"/{kernel}.v:" in line]

    top = sources[f"{kernel}.v"]
    assert top.count("_AWADDR(") == 4
    # AXI4 has no WID: with one a packager can take the port for AXI3.
    assert "_WID(" not in top
    assert top.count("_AWID(") == 3
    named = [line for line in complaints(top) if "SYMRSVDWORD" not in line]
    assert named == []
    wrong = top.replace(".m_axi_gmem0_ARLEN(m_axi_gmem0_ARLEN),", "")
    assert any("m_axi_gmem0_ARLEN" in line for line in complaints(wrong))


def test_emulation_has_no_reports_of_a_routed_design_and_an_emconfig(place):
    assert place.run("--target", "hw_emu") == 0
    name = f"{NAME}-hw_emu"
    assert (place.build / name / "emconfig.json").is_file()
    found = place.manifest(name)
    assert (found["target"], found["utilisation"]) == ("hw_emu", {})
    assert found["frequency"]["clock_mhz"] is None
    compiles = [call for call in place.calls() if call[:2] == ["v++", "-c"]]
    assert all("-g" in call and "hw_emu" in call for call in compiles)


@pytest.mark.parametrize(
    ("fault", "why", "line"),
    [
        ("compile", "compile_score_tokens", "ERROR: [v++ 207-3776] use of undeclared identifier"),
        ("overflow", "do not fit", "ERROR: [DRC UTLZ-1] Resource utilization: LUT as Logic"),
        ("place_check", "do not fit", "ERROR: [VPL 30-640] Place Check : This design requires"),
        ("cells", "do not fit", "| CLB LUTs                   | 530000 |"),
        ("scaled", "timing is not met", "automatically changed to 279.8 MHz"),
        ("system_clock", "timing is not met", "ERROR: [VPL 101-2] design did not meet timing"),
        ("slack", "timing is not met", "Timing constraints are not met. (WNS -0.241 ns"),
        ("hold", "timing is not met", "WHS -0.008 ns"),
        ("clock", "timing is not met", "the xclbin gives its kernels 280 MHz, 300 MHz were asked"),
        ("no_timing", "nothing shows that it works", "timing_summary_routed.rpt"),
        ("no_output", "link: v++ ended well, but", ".link.xclbin is not there"),
        ("killed", "was ended by signal 9", "Linking for hardware target"),
        ("platform", "was built for the platform", "xilinx_u200_gen3x16"),
        ("rewritten", "is damaged", "section 0 is not what was built"),
    ],
)
def test_what_fails_is_told_with_its_line_and_publishes_nothing(place, capsys, fault, why, line):
    assert place.run(fault=fault) == 1
    message = capsys.readouterr().err
    assert why in message
    assert line in message
    assert place.published() == []


def test_an_interrupted_build_leaves_no_process_and_publishes_nothing(place):
    place.monkeypatch.setenv("STANDIN_FAULT", "hang")
    options = ["--build", str(place.build), "--out", str(place.out)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "bitstream.py"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    line = next(line for line in process.stdout if line.startswith("processes "))
    assert all(Path(f"/proc/{number}").exists() for number in line.split()[1:])
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "was interrupted" in message
    assert not any(running(number) for number in line.split()[1:])
    assert place.published() == []


def running(number):
    """Whether a process is there and no zombie that waits for an init that collects none."""
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_slow_loop_is_a_warning_and_no_failure(place, capsys):
    assert place.run(fault="interval") == 0
    (warning, _) = place.manifest()["warnings"]
    expected = "loop dot_rounds in dot_shadow has II=2, the source intends II=1"
    assert warning == f"score_tokens: {expected}"
    assert f"warning: score_tokens: {expected}" in capsys.readouterr().out


def test_an_earlier_build_stays_where_a_later_one_fails(place):
    assert place.run() == 0
    before = (place.out / f"{NAME}.xclbin").read_bytes()
    assert place.run(fault="slack") == 1
    assert place.published() == [f"{NAME}.json", f"{NAME}.xclbin"]
    assert (place.out / f"{NAME}.xclbin").read_bytes() == before


def test_a_linked_build_is_finished_without_linking_again(place, capsys):
    assert place.run(fault="no_timing") == 1
    linked = len(place.calls())
    assert place.run("--finish") == 1
    assert "nothing shows that it works" in capsys.readouterr().err
    reports = Path(__file__).parent / "vitis_reports"
    name = "impl_1_hw_bb_locked_timing_summary_routed.rpt"
    shutil.copyfile(reports / name, place.build / NAME / "reports/link" / name)
    assert place.run("--finish") == 0
    assert place.published() == [f"{NAME}.json", f"{NAME}.xclbin"]
    assert [call[0] for call in place.calls()[linked:]] == ["xclbinutil"]


def test_without_vitis_the_commands_are_printed_and_sources_rendered(place, capsys):
    for program in place.programs.iterdir():
        program.unlink()
    place.monkeypatch.setenv("PLATFORM_REPO_PATHS", "")
    assert place.run("--kernels", "rtl") == 2
    text = capsys.readouterr().out
    for missing in ("vivado is not on PATH", "v++ is not on PATH", "xclbinutil is not on PATH"):
        assert missing in text
    assert f"the platform {PLATFORM} is not installed" in text
    name = NAME.replace("hls", "rtl")
    assert f"cd {place.build / name}\n" in text
    for start in ("vivado -mode batch", "v++ -l -t hw", "v++ -p -t hw", "xclbinutil --force"):
        assert f"\n{start}" in text
    for file in ("rtl/score_tokens/score_tokens.v", "rtl/score_tokens.tcl", "cfg/link.cfg"):
        assert (place.build / name / file).is_file()
    assert place.published() == []
    assert not place.record.exists()


def test_the_printed_commands_work_when_copied(place, capsys):
    """What is printed without Vitis runs in a shell with it."""
    place.monkeypatch.setenv("PLATFORM_REPO_PATHS", "")
    assert place.run("--platform", PLATFORM) == 2
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("cd "))
    end = next(index for index, line in enumerate(lines) if line.startswith("# spec_record"))
    script = "set -e\n" + "\n".join(lines[start:end]).replace(PLATFORM, str(place.platform))
    subprocess.run(["/bin/sh", "-c", script], check=True, capture_output=True)
    assert (place.build / NAME / "xclbin" / f"{NAME}.xclbin").is_file()


def test_only_what_is_missing_is_named(place, capsys):
    (place.programs / "xclbinutil").unlink()
    assert place.run() == 2
    text = capsys.readouterr().out
    assert "xclbinutil is not on PATH" in text
    assert "v++ is not on PATH" not in text
    assert "is not installed" not in text


def test_a_finished_build_survives_a_shell_without_vitis(place):
    assert place.run() == 0
    (place.programs / "v++").unlink()
    assert place.run() == 2
    assert (place.build / NAME / f"{NAME}.xclbin").is_file()


def test_wrong_settings_are_refused_before_anything_is_rendered(place, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        place.run("--preset", "llama-9")
    assert stopped.value.code == 2
    assert "invalid choice: 'llama-9'" in capsys.readouterr().err

    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"head_dim": 72, "kv_heads": 2, "group_size": 2}))
    assert place.run("--spec", str(spec)) == 2
    assert "head_dim=72 is not supported" in capsys.readouterr().err
    spec.write_text(json.dumps({"head_dim": 64, "heads": 2}))
    assert place.run("--spec", str(spec)) == 2
    assert "is no kernel spec; its fields are" in capsys.readouterr().err
    spec.write_text(json.dumps({"head_dim": 64}))
    assert place.run("--spec", str(spec)) == 2
    assert "is no whole kernel spec" in capsys.readouterr().err
    assert place.run("--spec", str(tmp_path / "none.json")) == 2
    assert "cannot read" in capsys.readouterr().err

    assert place.run("--frequency", "30") == 2
    assert "frequency=30 is outside 50..500 MHz" in capsys.readouterr().err
    place.build = tmp_path / "my build"
    assert place.run() == 2
    assert "it has a space" in capsys.readouterr().err
    assert not place.build.exists()


def test_a_spec_file_builds_what_no_preset_has(place, tmp_path):
    spec = KernelSpec(80, 4, 2, key_mode=KeyMode.INT8)
    path = tmp_path / "mine.json"
    path.write_text(spec.canonical_json())
    assert place.run("--spec", str(path)) == 0
    assert place.manifest("mine-hls")["spec_hash"] == spec.digest().hex()


def build_of(tmp_path, **changes):
    values = {
        "name": "a",
        "spec": SPEC,
        "source": KernelSource.HLS,
        "target": Target.HW,
        "platform": PLATFORM,
        "frequency": 300,
        "folder": tmp_path / "a",
    }
    return VitisBuild(**(values | changes))


def test_a_build_refuses_a_spec_without_kernels_and_paths_with_spaces(tmp_path):
    with pytest.raises(HardwareSpecError, match="head_dim=72"):
        build_of(tmp_path, spec=KernelSpec(72, 2, 2))
    with pytest.raises(VitisBuildError, match=r"build folder.*space"):
        build_of(tmp_path, folder=tmp_path / "a b")
    with pytest.raises(VitisBuildError, match=r"platform.*space"):
        build_of(tmp_path, platform="/opt/my platforms/a.xpfm")


def test_every_step_reads_what_earlier_steps_and_the_sources_left(tmp_path):
    for source in KernelSource:
        build = build_of(tmp_path, source=source, folder=tmp_path / source)
        write_sources(build)
        there = {
            path.relative_to(build.folder).as_posix() for path in build.folder.rglob("*") if path
        }
        for step in flow_steps(build):
            assert set(step.inputs) <= there, step.name
            there |= set(step.outputs)


def test_a_missing_input_stops_before_the_tool_starts(place, tmp_path):
    build = build_of(tmp_path, platform=str(place.platform))
    write_sources(build)
    (build.folder / "src" / "dot.h").unlink()
    with pytest.raises(BuildFailedError, match=r"compile_score_tokens: .*dot\.h is missing"):
        run_steps(flow_steps(build), build.folder, sys.stdout)
    assert not place.record.exists()


def test_an_output_of_an_earlier_run_does_not_pass_for_one_of_this(place, tmp_path):
    build = build_of(tmp_path, platform=str(place.platform))
    write_sources(build)
    steps = flow_steps(build)
    run_steps(steps, build.folder, sys.stdout)
    place.monkeypatch.setenv("STANDIN_FAULT", "no_output")
    with pytest.raises(BuildFailedError, match=r"\.link\.xclbin is not there"):
        run_steps(steps, build.folder, sys.stdout)


def test_the_stand_in_finds_a_missing_connection(place, tmp_path):
    """The twin of the runs that end well: the stand-in's checks can fail."""
    build = build_of(tmp_path, platform=str(place.platform))
    write_sources(build)
    config = build.folder / "cfg" / "link.cfg"
    config.write_text(config.read_text().replace("sp=score_tokens_1.queries:bank0\n", ""))
    with pytest.raises(BuildFailedError, match=r"sp\.score_tokens_1\.queries"):
        run_steps(flow_steps(build), build.folder, sys.stdout)


def test_the_link_configuration_connects_every_pointer(tmp_path):
    build = build_of(tmp_path)
    write_sources(build)
    lines = (build.folder / "cfg" / "link.cfg").read_text().splitlines()
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    for kernel in ("score_tokens", "make_shadow"):
        assert f"nk={kernel}:1:{kernel}_1" in lines
        for pointer in arguments(SPEC, kernel)[0]:
            assert f"sp={kernel}_1.{pointer}:bank0" in lines
