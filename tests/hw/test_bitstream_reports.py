# SPDX-License-Identifier: Apache-2.0
"""Parsers of Vitis' reports and logs, on texts written after the documented formats."""

import struct
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from hillinfer_hw.csim_build import HLS
from hillinfer_hw.hls_report import (
    LoopInterval,
    ReportError,
    find_hls_reports,
    intended_intervals,
    interval_warnings,
    read_hls_reports,
)
from hillinfer_hw.vitis_failures import (
    Failure,
    cause_line,
    failure_line,
    silent_failure_line,
)
from hillinfer_hw.vitis_reports import (
    data_clock_mhz,
    find_report,
    read_kernel_utilisation,
    read_timing,
    read_utilisation,
)

REPORTS = Path(__file__).parent / "vitis_reports"


def text_of(name):
    return (REPORTS / name).read_text()


def changed(tmp_path, name, old, new):
    text = text_of(name)
    assert old in text
    path = tmp_path / name
    path.write_text(text.replace(old, new))
    return path


def hls_report(*names):
    return read_hls_reports([REPORTS / name for name in names], "score_tokens")


def test_hls_report_of_one_kernel_and_its_modules():
    report = hls_report("score_tokens_csynth.xml", "dot_shadow_csynth.xml")
    assert (report.target_clock_ns, report.estimated_clock_ns) == (3.33, 2.433)
    assert report.latency_cycles == (None, None)
    assert report.resources == {"lut": 61877, "ff": 48211, "dsp": 36, "bram_18k": 122, "uram": 0}
    assert report.loops == (LoopInterval("dot_shadow", "dot_rounds", 1),)


def test_hls_report_with_its_modules_in_one_file():
    assert hls_report("csynth.xml").loops == (
        LoopInterval("dot_shadow", "dot_rounds", 1),
        LoopInterval("spread_exponents", "spread_rounds", 2),
    )


def test_a_loop_is_counted_once_wherever_it_is_reported():
    loops = hls_report("csynth.xml", "dot_shadow_csynth.xml", "dot_shadow_csynth.xml").loops
    assert len(loops) == 2


def test_numbers_of_latency_are_read_where_there_are_any(tmp_path):
    old = "<Worst-caseLatency>undef</Worst-caseLatency>"
    path = changed(tmp_path, "score_tokens_csynth.xml", old, old.replace("undef", "4171"))
    assert read_hls_reports([path], "score_tokens").latency_cycles == (None, 4171)


def test_slow_loops_are_named_and_slow_ones_by_intention_are_not():
    intended = intended_intervals(HLS)
    assert (intended["dot_rounds"], intended["spread_rounds"]) == (1, 2)
    assert "write_segments" not in intended
    well = hls_report("csynth.xml")
    assert interval_warnings(well, intended, "score_tokens") == []
    slow = hls_report("score_tokens_csynth.xml", "dot_shadow_slow_csynth.xml")
    assert interval_warnings(slow, intended, "score_tokens") == [
        "score_tokens: loop dot_rounds in dot_shadow has II=2, the source intends II=1"
    ]
    silent = hls_report("score_tokens_csynth.xml")
    (line,) = interval_warnings(silent, intended, "score_tokens")
    assert "names none of the source's pipelined loops" in line


def test_hls_reports_that_are_none_are_refused(tmp_path):
    with pytest.raises(ReportError, match="is about make_shadow, not about score_tokens"):
        hls_report("make_shadow_csynth.xml")
    with pytest.raises(ReportError, match=r"no csynth\.xml of score_tokens"):
        read_hls_reports([], "score_tokens")
    cut = tmp_path / "cut.xml"
    cut.write_text(text_of("csynth.xml")[:900])
    with pytest.raises(ReportError, match="cannot be read"):
        read_hls_reports([cut], "score_tokens")


def test_hls_reports_are_found_with_the_whole_kernel_first(tmp_path):
    folder = tmp_path / "temp" / "compile_score_tokens" / "score_tokens" / "syn" / "report"
    folder.mkdir(parents=True)
    for name in ("centre_csynth.xml", "score_tokens_csynth.xml", "csynth.xml", "csynth.rpt"):
        (folder / name).write_text("")
    found = [path.name for path in find_hls_reports(tmp_path, "score_tokens")]
    assert found == ["csynth.xml", "score_tokens_csynth.xml", "centre_csynth.xml"]
    assert find_hls_reports(tmp_path, "make_shadow") == []


def test_utilisation_of_the_design():
    cells = read_utilisation(REPORTS / "impl_1_full_util_routed.rpt")
    assert {name: (own.used, own.available) for name, own in cells.items()} == {
        "lut": (196411, 522720),
        "ff": (243886, 1045440),
        "dsp": (43, 1968),
        "bram": (311.5, 984),
        "uram": (0, 128),
    }
    assert cells["lut"].share == pytest.approx(0.37575, abs=1e-5)
    assert cells["dsp"].line.startswith("| DSPs ")


def test_utilisation_in_the_columns_of_older_releases(tmp_path):
    """Vivado before 2021 has no column Prohibited, and marks names that have a footnote."""
    lines = []
    for line in text_of("impl_1_full_util_routed.rpt").splitlines():
        fields = line.split("|")
        if len(fields) == 8:
            del fields[4]
        lines.append("|".join(fields).replace("| CLB LUTs ", "| CLB LUTs*"))
    path = tmp_path / "old.rpt"
    path.write_text("\n".join(lines))
    assert "Prohibited" not in path.read_text()
    assert read_utilisation(path)["lut"].available == 522720
    assert read_utilisation(path)["bram"].used == 311.5


def test_a_utilisation_report_without_a_resource_is_refused(tmp_path):
    path = changed(tmp_path, "impl_1_full_util_routed.rpt", "| DSPs ", "| Else ")
    with pytest.raises(ReportError, match="no row 'DSPs'"):
        read_utilisation(path)
    with pytest.raises(ReportError, match="cannot be read"):
        read_utilisation(tmp_path / "none.rpt")


def test_utilisation_of_the_kernels():
    cells = read_kernel_utilisation(REPORTS / "impl_1_kernel_util_routed.rpt")
    assert cells["Platform"]["lut"] == 92317
    assert cells["make_shadow_1"] == {"lut": 41790, "ff": 30304, "bram": 51, "uram": 0, "dsp": 0}


def test_timing_that_is_met_and_timing_that_is_not():
    met = read_timing(REPORTS / "impl_1_hw_bb_locked_timing_summary_routed.rpt")
    assert (met.setup_ns, met.hold_ns, met.met) == (0.012, 0.010, True)
    slow = read_timing(REPORTS / "impl_1_timing_failed.rpt")
    assert (slow.setup_ns, slow.met) == (-0.241, False)
    assert slow.verdict == "Timing constraints are not met."
    hold = read_timing(REPORTS / "impl_1_hold_failed.rpt")
    assert (hold.hold_ns, hold.met) == (-0.008, False)


def test_slack_counts_whatever_the_verdict_says(tmp_path):
    name = "impl_1_timing_failed.rpt"
    sentence = "All user specified timing constraints are met."
    path = changed(tmp_path, name, "Timing constraints are not met.", sentence)
    assert not read_timing(path).met
    path = changed(tmp_path, "impl_1_hold_failed.rpt", "Timing constraints are not met.", sentence)
    assert not read_timing(path).met
    path = changed(tmp_path, name, " -0.241", "  0.241")
    assert not read_timing(path).met


def test_what_is_no_timing_summary_is_refused(tmp_path):
    with pytest.raises(ReportError, match="no timing summary"):
        read_timing(REPORTS / "impl_1_full_util_routed.rpt")
    name = "impl_1_timing_failed.rpt"
    with pytest.raises(ReportError, match="no timing summary"):
        read_timing(changed(tmp_path, name, "Timing constraints are not met.", ""))
    with pytest.raises(ReportError, match="no timing summary"):
        read_timing(changed(tmp_path, name, " -0.241", "     NA"))


def test_the_last_timing_report_is_taken(tmp_path):
    patterns = ("*_postroute_physopted.rpt", "*_routed.rpt")
    folder = tmp_path / "reports" / "link" / "link" / "imp"
    folder.mkdir(parents=True)
    with pytest.raises(ReportError, match=r"no \*_postroute_physopted\.rpt or \*_routed\.rpt"):
        find_report(tmp_path, *patterns)
    (folder / "timing_routed.rpt").write_text("")
    assert find_report(tmp_path, *patterns).name == "timing_routed.rpt"
    (folder / "timing_postroute_physopted.rpt").write_text("")
    assert find_report(tmp_path, *patterns).name == "timing_postroute_physopted.rpt"


def clocks(*entries):
    packed = [struct.pack("<HB5x128s", *entry) for entry in entries]
    return struct.pack("<h", len(packed)) + b"".join(packed)


def test_the_data_clock_of_an_xclbin():
    assert data_clock_mhz(clocks((500, 2, b"KERNEL_CLK"), (279, 1, b"DATA_CLK"))) == 279
    assert data_clock_mhz(clocks((500, 2, b"KERNEL_CLK"))) is None
    assert data_clock_mhz(clocks((279, 1, b"DATA_CLK"))[:-1]) is None
    assert data_clock_mhz(b"") is None


@pytest.mark.parametrize("log", ["compile.log", "link.log"])
def test_logs_of_runs_that_ended_well_name_no_failure(log):
    assert failure_line(text_of(log)) is None
    assert silent_failure_line(text_of(log)) is None
    assert cause_line(text_of(log)) is None


@pytest.mark.parametrize(
    ("log", "failure", "start"),
    [
        ("compile_error.log", Failure.ERROR, "ERROR: [v++ 207-3776] use of undeclared"),
        ("link_system_clock.log", Failure.TIMING, "ERROR: [VPL 101-2] design did not meet timing"),
        ("link_place_check.log", Failure.OVERFLOW, "ERROR: [VPL 30-640] Place Check"),
        ("impl_runme_overflow.log", Failure.OVERFLOW, "ERROR: [DRC UTLZ-1] Resource utilization"),
    ],
)
def test_the_line_that_says_why_a_run_failed(log, failure, start):
    found = failure_line(text_of(log))
    assert found is not None
    assert found[0] is failure
    assert found[1].startswith(start)


def test_a_lowered_clock_is_a_failure_of_a_run_that_ended_well():
    failure, line = silent_failure_line(text_of("link_scaled.log"))
    assert failure is Failure.TIMING
    assert "automatically changed to 279.8 MHz" in line


def test_warnings_of_timing_do_not_hide_why_a_run_failed():
    """Timing is warned of in the middle of runs that then mend it, or fail for another reason."""
    log = (
        "CRITICAL WARNING: [Timing 38-282] The design failed to meet the timing requirements.\n"
        "ERROR: [Common 17-345] A valid license was not found for feature 'Implementation'\n"
    )
    assert failure_line(log)[1].startswith("ERROR: [Common 17-345]")
    assert cause_line(log) is None
    assert silent_failure_line(log)[0] is Failure.TIMING


def test_a_cause_is_preferred_to_what_follows_from_it():
    log = "ERROR: [VPL 60-773] caught Tcl error\nERROR: [Synth 8-439] module 'fifo' not found\n"
    assert failure_line(log) == (Failure.ERROR, "ERROR: [Synth 8-439] module 'fifo' not found")
    assert failure_line("src/dot.h:4:1: error: expected ';'\n")[0] is Failure.ERROR
