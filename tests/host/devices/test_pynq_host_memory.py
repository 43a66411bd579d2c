# SPDX-License-Identifier: Apache-2.0
"""Host memory hidden from PYNQ: nothing else changes, and what would be lost is refused."""

import struct
from uuid import UUID

import pytest

from hillinfer.devices.xrt.xclbin import (
    HW_EMU,
    SectionKind,
    Xclbin,
    XclbinError,
    check_xclbin,
    spec_record,
)
from hillinfer_hw.xclbin_sections import (
    Connection,
    MemoryBank,
    MemoryType,
    pack_banks,
    pack_connections,
    unpack_banks,
)
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_pynq.execution import without_host_memory

SPEC = KernelSpec(64, 3, 3)
DDR = MemoryBank("bank0", MemoryType.DDR4, 4 << 30, 0)
HOST = MemoryBank("HOST[0]", MemoryType.HOST, 16 << 30, 1 << 40)
SECOND = MemoryBank("bank1", MemoryType.DDR4, 4 << 30, 4 << 30)
TO_DDR = Connection(0, 0, 0)


def make(banks, connections=(TO_DDR,)):
    sections = {
        SectionKind.BITSTREAM: b"bits",
        SectionKind.MEM_TOPOLOGY: pack_banks(banks),
        SectionKind.CONNECTIVITY: pack_connections(connections),
    }
    sections[SectionKind.USER_METADATA] = spec_record(SPEC, sections)
    return Xclbin("shell", UUID(int=77), HW_EMU, sections)


def types_of(xclbin):
    """Type and use of every bank, as PYNQ reads them."""
    content = xclbin.sections[SectionKind.MEM_TOPOLOGY]
    (count,) = struct.unpack_from("<i", content)
    return [tuple(content[8 + 40 * i : 10 + 40 * i]) for i in range(count)]


def test_host_memory_is_hidden_and_other_banks_keep_their_numbers():
    xclbin = make([DDR, HOST, SECOND], [Connection(0, 0, 2)])
    hidden = without_host_memory(xclbin, SPEC, "a.xclbin")
    assert types_of(hidden) == [(1, 1), (2, 0), (1, 1)]
    assert unpack_banks(hidden.sections[SectionKind.MEM_TOPOLOGY], "a") == [DDR, SECOND]
    changed = {SectionKind.MEM_TOPOLOGY, SectionKind.USER_METADATA}
    assert hidden.sections.keys() == xclbin.sections.keys()
    assert all(
        hidden.sections[kind] == own for kind, own in xclbin.sections.items() if kind not in changed
    )
    assert (hidden.platform, hidden.uuid, hidden.mode) == (xclbin.platform, xclbin.uuid, HW_EMU)


def test_the_record_fits_the_changed_list():
    hidden = without_host_memory(make([DDR, HOST]), SPEC, "a.xclbin")
    check_xclbin(hidden, SPEC, "shell", "a.xclbin")


def test_without_host_memory_nothing_changes():
    xclbin = make([DDR, SECOND])
    assert without_host_memory(xclbin, SPEC, "a.xclbin") == xclbin


def test_a_kernel_that_reaches_host_memory_is_refused():
    xclbin = make([DDR, HOST], [Connection(0, 0, 0), Connection(1, 0, 1)])
    with pytest.raises(XclbinError, match=r"a\.xclbin: a kernel reaches host memory"):
        without_host_memory(xclbin, SPEC, "a.xclbin")


@pytest.mark.parametrize("size", [0, 4, 8, 47])
def test_a_list_that_is_cut_short_is_refused(size):
    whole = make([DDR])
    content = whole.sections[SectionKind.MEM_TOPOLOGY][:size]
    cut = Xclbin("shell", whole.uuid, HW_EMU, {**whole.sections, SectionKind.MEM_TOPOLOGY: content})
    with pytest.raises(XclbinError, match="list of memories is missing or cut short"):
        without_host_memory(cut, SPEC, "a.xclbin")
