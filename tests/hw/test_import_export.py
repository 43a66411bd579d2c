# SPDX-License-Identifier: Apache-2.0
"""RTL in the form of a Vitis HLS export is imported, and runs in the same bench.

The export is made here from this project's own RTL: no vendor tool is needed, and none is proved.
"""

import shutil

import pytest
from launch_cases import random_launch
from rtl_kernels import SMALL

from hillinfer_hw.cocotb_bench import run_bench, save_case
from hillinfer_hw.import_export import import_export
from hillinfer_hw.rtl import launch_arguments
from hillinfer_hw.rtl_files import RtlSource, argument_offsets, render_rtl
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_model.choices import Scope
from hillinfer_model.golden_launch import run_score_launch

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


def export(folder, control=HEADER):
    """This project's RTL as an export would lie in a folder."""
    folder.mkdir()
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


def test_an_import_runs_in_the_bench(tmp_path):
    launch = random_launch(SMALL, Scope.LAYER, [33, 70])
    inputs, name, output, scalars = launch_arguments(SMALL, launch)
    case = tmp_path / "case.npz"
    golden = run_score_launch(SMALL, launch)
    save_case(case, {**inputs, name: output}, name, scalars, golden)
    try:
        result = run_bench(import_export(export(tmp_path / "verilog")), case, "icarus", tmp_path)
    except MissingToolError as missing:
        pytest.skip(str(missing))
    assert result.passed
    assert not result.failed
