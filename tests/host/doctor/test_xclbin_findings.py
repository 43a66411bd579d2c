# SPDX-License-Identifier: Apache-2.0
"""What doctor says about an xclbin, and about a card played by a stand-in for pyxrt."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made_xclbin import PLATFORM, SPEC, make

from hillinfer.devices.xrt.xclbin import HARDWARE, HW_EMU, SectionKind
from hillinfer.doctor.cards import BLOCKS, xclbin_findings
from hillinfer.doctor.finding import Verdict
from hillinfer_model.choices import KeyMode

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))
from faulty_calls import WithoutDirectIO

OTHER_HASH = replace(SPEC, key_mode=KeyMode.INT8).digest().hex()
CARD, CURVE = "xclbin on its card", "P2P read curve"


class Image:
    """An xclbin beside what leads to its card."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.path = folder / "kernels.xclbin"
        self.told = folder / "told"
        self.modules = folder / "modules"
        self.modules.mkdir()
        shutil.copy(Path(__file__).with_name("stand_in_pyxrt.py"), self.modules / "pyxrt.py")
        self.write(make(mode=HARDWARE).pack())
        self.lead()

    def write(self, content):
        self.path.write_bytes(content)

    def lead(self, fault="", shell=PLATFORM):
        variables = {
            "PYTHONPATH": str(self.modules), "TOLD": str(self.told), "FAULT": fault,
            "SHELL_NAME": shell,
        }  # fmt: skip
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)

    def findings(self, cold_dir, calls=None):
        found = list(xclbin_findings(self.path, cold_dir, calls=calls))
        assert len({one.name for one in found}) == len(found), "each row comes once"
        return {one.name: one for one in found}

    def no_worker_was_started(self):
        return not self.told.exists()

    def nothing_is_left(self):
        process, folder = self.told.read_text().split(" ", 1)
        return not Path(f"/proc/{process}").exists() and not Path(folder).exists()


@pytest.fixture
def image(tmp_path, monkeypatch):
    return Image(tmp_path, monkeypatch)


def with_record(change):
    """An xclbin whose record was changed after the build."""
    own = make()
    record = json.loads(own.sections[SectionKind.USER_METADATA])
    change(record)
    sections = {**own.sections, SectionKind.USER_METADATA: json.dumps(record).encode()}
    return replace(own, sections=sections).pack()


def without_record():
    own = make()
    sections = {k: v for k, v in own.sections.items() if k != SectionKind.USER_METADATA}
    return replace(own, sections=sections).pack()


def with_flipped_bit():
    content = bytearray(make().pack())
    content[content.index(b"bitsbits") + 2000] ^= 1
    return bytes(content)


UNUSABLE = {
    "empty": (lambda: b"", "is no xclbin"),
    "another file": (lambda: b"\x7fELF" + bytes(1000), "is no xclbin"),
    "truncated header": (lambda: make().pack()[:300], "is cut short"),
    "truncated": (lambda: make().pack()[:-100], "damaged or cut short"),
    "damaged": (with_flipped_bit, "is damaged: section 0 is not what was built"),
    "no record": (without_record, "does not say which kernels it holds"),
    "hash of another spec": (
        lambda: with_record(lambda record: record.update(spec_hash=OTHER_HASH)),
        "holds kernels of another spec",
    ),
    "spec of another hash": (
        lambda: with_record(lambda record: record["spec"].update(key_mode="int8")),
        "holds kernels of another spec",
    ),
    "a spec that there is not": (
        lambda: with_record(lambda record: record["spec"].update(key_mode="int3")),
        "its kernels' spec is none",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_xclbin_that_cannot_be_used_is_told_with_the_reason(image, tmp_path, case):
    content, reason = UNUSABLE[case]
    image.write(content())
    (row,) = image.findings(tmp_path).values()
    assert (row.name, row.verdict, row.found) == ("xclbin", Verdict.WARNING, "unusable")
    assert reason in row.fix
    assert str(image.path) in row.fix
    assert image.no_worker_was_started()


def test_a_record_that_was_only_written_again_is_not_refused(image, cold_dir):
    image.write(with_record(lambda record: None))
    assert image.findings(cold_dir)["xclbin"].verdict is Verdict.OK


def test_an_xclbin_that_is_not_there(image, tmp_path):
    image.path.unlink()
    (row,) = image.findings(tmp_path).values()
    assert row.verdict is Verdict.WARNING
    assert "cannot read" in row.fix


def test_an_xclbin_on_its_card(image, cold_dir):
    rows = image.findings(cold_dir)
    assert list(rows) == ["xclbin", CARD, CURVE]
    assert rows["xclbin"].verdict is Verdict.OK
    assert SPEC.digest().hex()[:16] in rows["xclbin"].found
    assert "int4 weight_sum, heads of 64, 3 KV heads, 3 query heads each" in rows["xclbin"].found
    assert rows[CARD].verdict is Verdict.OK
    assert rows[CARD].found == f"{PLATFORM} at 0000:17:00.1, 4.0 GiB"
    rates = re.findall(r"([\d.]+ [KM]iB) ([\d.]+) GB/s", rows[CURVE].found)
    assert [size for size, _ in rates] == ["4.0 KiB", "64.0 KiB", "256.0 KiB", "1.0 MiB", "4.0 MiB"]
    assert len(rates) == len(BLOCKS)
    assert "not a card's" not in rows[CURVE].found
    assert image.nothing_is_left()
    assert list(cold_dir.iterdir()) == []


def test_the_curve_says_where_the_reads_went(image, cold_dir):
    row = image.findings(cold_dir)[CURVE]
    assert f"from {cold_dir} straight into the card's memory" in row.found
    assert "a run measures its own reads" in row.found


def test_an_emulated_card_is_called_so(image, cold_dir):
    image.write(make().pack())
    rows = image.findings(cold_dir)
    assert rows[CARD].found == f"{PLATFORM} (emulated), 4.0 GiB"
    assert rows[CURVE].found.endswith("(not a card's: into this machine's memory)")


def test_reads_through_the_page_cache_are_not_called_p2p(image, cold_dir):
    row = image.findings(cold_dir, WithoutDirectIO())[CURVE]
    assert row.verdict is Verdict.WARNING
    assert row.found.endswith("(through the page cache, no P2P)")
    assert "--cold-dir" in row.fix


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no library", "cannot import pyxrt: libxrt_coreutil.so.2: cannot open"),
        ("no device", "Could not open device with index '0'"),
        ("dies", "its process has ended"),
    ],
)
def test_a_card_that_cannot_be_opened_is_unusable(image, cold_dir, fault, reason):
    image.lead(fault)
    rows = image.findings(cold_dir)
    assert list(rows) == ["xclbin", CARD]
    assert rows["xclbin"].verdict is Verdict.OK
    assert (rows[CARD].verdict, rows[CARD].found) == (Verdict.WARNING, "unusable")
    assert reason in rows[CARD].fix
    assert image.nothing_is_left()


def test_an_xclbin_for_another_shell_is_unusable_on_this_card(image, cold_dir):
    image.lead(shell="xilinx_u50_gen3x16_xdma_5_202210_1")
    rows = image.findings(cold_dir)
    assert (rows[CARD].verdict, rows[CARD].found) == (Verdict.WARNING, "unusable")
    assert f"built for the platform '{PLATFORM}', the card has 'xilinx_u50" in rows[CARD].fix
    assert CURVE not in rows
    assert image.nothing_is_left()


def test_a_lead_that_cannot_be_read_is_told(image, cold_dir):
    image.write(make(mode=HW_EMU).pack())
    image.path.with_name("environment.json").write_text("{")
    rows = image.findings(cold_dir)
    assert rows[CARD].found == "unusable"
    assert "environment.json" in rows[CARD].fix
    assert image.no_worker_was_started()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no p2p", "no memory that a drive can reach: failed to allocate a P2P buffer"),
        ("lost writes", "does not hold what was read"),
    ],
)
def test_a_card_that_drives_cannot_reach_has_no_curve(image, cold_dir, fault, reason):
    image.lead(fault)
    rows = image.findings(cold_dir)
    assert rows[CARD].verdict is Verdict.OK
    assert (rows[CURVE].verdict, rows[CURVE].found) == (Verdict.WARNING, "not measured")
    assert reason in rows[CURVE].fix
    assert image.nothing_is_left()


def test_a_directory_that_is_not_there_has_no_curve(image, tmp_path):
    rows = image.findings(tmp_path / "none")
    assert rows[CARD].verdict is Verdict.OK
    assert rows[CURVE].found == "not measured"
    assert "create it" in rows[CURVE].fix
    assert image.nothing_is_left()
