# SPDX-License-Identifier: Apache-2.0
"""Doctor's rows about an xclbin, behind the real XRT with an emulated card."""

import re
from dataclasses import replace

import pytest
from emulated_cards import ONE_PROCESS, SMALL, surround

from hillinfer.devices.xrt.process import Deadlines, WorkerProcess
from hillinfer.devices.xrt.xclbin import SectionKind, Xclbin, spec_record
from hillinfer.doctor.cards import xclbin_findings
from hillinfer.doctor.finding import Verdict
from hillinfer.system.processes import processes_in
from hillinfer_hw.emulation import Engine
from hillinfer_hw.emulation_image import PLATFORM

pytestmark = ONE_PROCESS


class Watched:
    """Starts workers, and knows their folders."""

    def __init__(self):
        self.folders = []

    def __call__(self, *given):
        worker = WorkerProcess(*given)
        self.folders.append(worker.folder)
        assert processes_in(worker.folder) == [worker.pid]
        return worker


@pytest.fixture
def watched():
    return Watched()


def rows(path, cold_dir, watched, deadlines=None):
    found = xclbin_findings(path, cold_dir, deadlines, start=watched)
    return {finding.name: finding for finding in found}


def test_an_emulated_card_has_all_rows_and_leaves_nothing(cards, watched, tmp_path):
    found = rows(cards(Engine.HLS).xclbin, tmp_path, watched)
    assert {name: one.verdict for name, one in found.items()} == {
        "xclbin": Verdict.OK,
        "xclbin on its card": Verdict.OK,
        "P2P read curve": Verdict.OK,
    }
    assert all(one.fix is None for one in found.values())
    assert SMALL.digest().hex()[:16] in found["xclbin"].found
    assert found["xclbin on its card"].found == f"{PLATFORM} (emulated), 4.0 GiB"
    curve = found["P2P read curve"].found
    rates = [float(rate) for rate in re.findall(r"iB ([\d.]+) GB/s", curve)]
    assert len(rates) == 5
    assert rates[-1] > 0
    assert curve.endswith("(not a card's: into this machine's memory)")
    (folder,) = watched.folders
    assert not folder.exists()
    assert processes_in(folder) == []
    assert list(tmp_path.iterdir()) == []


def test_a_card_whose_process_does_not_start_is_unusable_and_leaves_nothing(
    cards, watched, tmp_path
):
    own = Xclbin.read(cards(Engine.HLS).xclbin)
    sections = dict(own.sections)
    del sections[SectionKind.USER_METADATA]
    sections[SectionKind.BITSTREAM] = sections[SectionKind.BITSTREAM].replace(
        b"simulate.sh", b"simulate.no"
    )
    sections[SectionKind.USER_METADATA] = spec_record(SMALL, sections)
    surround(tmp_path, cards(Engine.HLS))
    path = tmp_path / "kernels.xclbin"
    path.write_bytes(replace(own, sections=sections).pack())
    found = rows(path, tmp_path, watched, Deadlines(load=2.0))
    assert found["xclbin"].verdict is Verdict.OK
    assert found["xclbin on its card"].verdict is Verdict.WARNING
    assert found["xclbin on its card"].found == "unusable"
    assert "P2P read curve" not in found
    (folder,) = watched.folders
    assert not folder.exists()
    assert processes_in(folder) == []
