# SPDX-License-Identifier: Apache-2.0
"""RTL in the form of a Vitis HLS export is imported, and runs in the same bench.

The export is made here from this project's own RTL: no vendor tool is needed, and none is proved.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rtl_kernels import SMALL

from hillinfer_hw.import_export import check_export, import_export
from hillinfer_hw.rtl_files import RtlSource, argument_offsets, render_rtl
from hillinfer_model.choices import KeyMode

HEADER = """//------------------------Address Info-------------------
// 0x00 : Control signals
//        bit 0  - ap_start (Read/Write/COH)
//        bit 1  - ap_done (Read)
//        bit 2  - ap_idle (Read)
//        bit 3  - ap_ready (Read/COR)
//        bit 4  - ap_continue (Read/Write/SC)
//        bit 7  - auto_restart (Read/Write)
//        others - reserved
"""


def export(folder, control=HEADER, below="."):
    """This project's RTL as an export would lie in a folder."""
    folder = folder / below
    folder.mkdir(parents=True, exist_ok=True)
    offsets = argument_offsets(SMALL, "score_tokens")
    pointers = [name for name in offsets if name not in ("segment_count", "scope", "launch_id")]
    text = control
    for name, offset in offsets.items():
        text += f"// 0x{offset:02x} : Data signal of {name}\n"
        text += f"//        bit 31~0 - {name}[31:0] (Read/Write)\n"
        if name in pointers:
            text += f"// 0x{offset + 4:02x} : Data signal of {name}\n"
            text += f"//        bit 31~0 - {name}[63:32] (Read/Write)\n"
    (folder / "score_tokens_control_s_axi.v").write_text(text)
    for path in render_rtl(SMALL, "score_tokens").files:
        shutil.copy(path, folder)
    return folder


def test_the_manifest_is_what_the_comments_and_the_ports_say(tmp_path):
    source = import_export(export(tmp_path / "verilog"))
    own = render_rtl(SMALL, "score_tokens")
    assert (source.top, source.bundles, source.arguments, source.control) == (
        own.top,
        own.bundles,
        own.arguments,
        own.control,
    )
    assert source.origin == "vitis_hls"
    assert RtlSource.from_json(source.to_json()) == source


def test_without_ap_continue_the_protocol_is_the_other_one(tmp_path):
    lines = [line for line in HEADER.splitlines(keepends=True) if "ap_continue" not in line]
    assert import_export(export(tmp_path / "verilog", "".join(lines))).control == "ap_ctrl_hs"


@pytest.mark.parametrize("missing", ["score_tokens_control_s_axi.v", "score_tokens.sv"])
def test_what_is_no_export_is_refused(missing, tmp_path):
    folder = export(tmp_path / "verilog")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match="holds"):
        import_export(folder)


def test_the_folder_may_be_the_solution_or_the_project(tmp_path):
    inner = tmp_path / "project" / "solution1" / "syn" / "verilog"
    inner.parent.mkdir(parents=True)
    expected = import_export(export(inner))
    assert import_export(tmp_path / "project" / "solution1") == expected
    assert import_export(tmp_path / "project") == expected
    export(tmp_path / "project" / "solution2", below="syn/verilog")
    with pytest.raises(ValueError, match="several exports"):
        import_export(tmp_path / "project")


def test_vendor_ip_is_refused_by_name(tmp_path):
    folder = export(tmp_path / "verilog")
    (folder / "score_tokens_fmul_32ns_ip.tcl").write_text("")
    with pytest.raises(ValueError, match="score_tokens_fmul_32ns_ip"):
        import_export(folder)


def test_an_export_of_another_kernel_is_refused(tmp_path):
    source = import_export(export(tmp_path / "verilog"))
    check_export(source, SMALL, "score_tokens")
    with pytest.raises(ValueError, match="is score_tokens"):
        check_export(source, SMALL, "make_shadow")
    with pytest.raises(ValueError, match=r"key mode fp16 has .*statistics"):
        check_export(source, replace(SMALL, key_mode=KeyMode.FP16), "score_tokens")
    with pytest.raises(ValueError, match="top module is vadd"):
        check_export(replace(source, top="vadd"), SMALL, "score_tokens")


def command(*arguments):
    """What `make cocotb EXPORT=...` runs."""
    tool = Path(__file__).parents[2] / "tools" / "cocotb_bench.py"
    done = subprocess.run(
        [sys.executable, tool, *map(str, arguments)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs its spec"),
        (("--preset", "llama-3.1-8b", "--mode", "fp16"), "statistics"),
        (("--kernel", "make_shadow-int4"), "is score_tokens"),
    ],
)
def test_the_command_refuses_what_cannot_be_run(arguments, message, tmp_path):
    folder = export(tmp_path / "verilog")
    out = tmp_path / "cocotb.json"
    status, text = command("--export", folder, "--out", out, *arguments)
    assert status == 2
    assert message in text
    assert not out.exists()


def test_the_command_refuses_another_folder(tmp_path):
    status, text = command("--export", tmp_path, "--kernel", "int8-raw_sum")
    assert status == 2
    assert "_control_s_axi.v" in text


def test_a_missing_simulator_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ("--simulator", "icarus", "--kernel", "int8-raw_sum", "--out", tmp_path / "out")
    status, text = command(*arguments)
    assert status == 2
    assert "is missing" in text


@pytest.mark.parametrize("spec_hash", ["right", "wrong"])
def test_an_import_runs_in_the_bench(spec_hash, tmp_path):
    """The twin: with the status beats of another spec the bench must refuse the same export."""
    if shutil.which("iverilog") is None:
        pytest.skip("Icarus Verilog is missing: on Debian, apt install iverilog")
    pytest.importorskip("cocotb", reason="pip install cocotb==2.1.0 cocotbext-axi==0.1.28")
    folder = export(tmp_path / "verilog")
    if spec_hash == "wrong":
        top = folder / "score_tokens.sv"
        top.write_text(re.sub(r"SPEC_HASH\(64'h.", "SPEC_HASH(64'h0", top.read_text()))
    out = tmp_path / "cocotb.json"
    arguments = ("--kernel", "int8-raw_sum", "--simulator", "icarus", "--out", out)
    status, text = command("--export", folder, *arguments)
    rows = json.loads(out.read_text())["rows"]
    assert {row["origin"] for row in rows} == {"vitis_hls"}
    assert sum(row["launches"] for row in rows) > 0
    if spec_hash == "right":
        assert status == 0, text
        # What only this project's RTL promises is not asked of an export.
        assert "3 skipped" in text
    else:
        assert status == 1, text
        assert any(row["mismatches"] for row in rows)
