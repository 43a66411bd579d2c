# SPDX-License-Identifier: Apache-2.0
"""The xclbin container: read back as written, and refused where it is not what it says."""

import struct
from dataclasses import replace
from uuid import UUID

import pytest
from made_xclbin import BANKS, CONNECTIONS, INSTANCES, PLATFORM, SPEC, make

from hillinfer.devices.xrt.process import Deadlines, deadlines_of
from hillinfer.devices.xrt.xclbin import (
    HARDWARE,
    HW_EMU,
    SectionKind,
    Xclbin,
    XclbinError,
    check_xclbin,
    shell_of,
)
from hillinfer_hw.xclbin_sections import unpack_banks, unpack_connections, unpack_instances
from hillinfer_model.choices import KeyMode


def test_what_was_packed_is_read_back():
    xclbin = make()
    again = Xclbin.unpack(xclbin.pack(), "a.xclbin")
    assert again == xclbin
    assert unpack_banks(again.sections[SectionKind.MEM_TOPOLOGY], "a") == BANKS
    assert unpack_instances(again.sections[SectionKind.IP_LAYOUT], "a") == INSTANCES
    assert unpack_connections(again.sections[SectionKind.CONNECTIVITY], "a") == CONNECTIONS
    check_xclbin(again, SPEC, PLATFORM, "a.xclbin")


def test_fields_lie_where_xclbin_h_has_them():
    content = make().pack()
    assert content[:8] == b"xclbin2\0"
    assert struct.unpack_from("<i", content, 8) == (-1,)
    assert struct.unpack_from("<Q", content, 304) == (len(content),)
    assert struct.unpack_from("<H", content, 304 + 28) == (HW_EMU,)
    assert content[304 + 48 :].startswith(PLATFORM.encode() + b"\0")
    assert content[304 + 112 : 304 + 128] == UUID(int=77).bytes
    assert struct.unpack_from("<I", content, 304 + 144) == (5,)
    kind, offset, size = struct.unpack_from("<I20xQQ", content, 456)
    assert (kind, offset % 8, content[offset : offset + size]) == (0, 0, b"bits" * 1001)


@pytest.mark.parametrize("length", [0, 7, 100, 303, 455, 500, 1000, -1])
def test_a_file_that_is_cut_short_is_refused(length):
    with pytest.raises(XclbinError, match=r"a\.xclbin is (no xclbin|cut short|damaged)"):
        Xclbin.unpack(make().pack()[:length], "a.xclbin")


@pytest.mark.parametrize("place", range(0, 5200, 37))
def test_a_flipped_bit_is_refused_or_lies_in_padding(place):
    content = bytearray(make().pack())
    place %= len(content)
    content[place] ^= 4
    try:
        found = Xclbin.unpack(bytes(content), "a.xclbin")
        check_xclbin(found, SPEC, PLATFORM, "a.xclbin")
    except XclbinError:
        return
    # What no reader looks at: signature fields, time stamps, versions, names, padding.
    assert {**found.sections} == {**make().sections}


def test_an_xclbin_of_another_spec_is_refused_with_what_differs():
    other = replace(SPEC, key_mode=KeyMode.INT8)
    with pytest.raises(XclbinError, match="key_mode='int4' instead of 'int8'"):
        check_xclbin(make(), other, PLATFORM, "a.xclbin")


def test_an_xclbin_for_another_platform_is_refused():
    with pytest.raises(XclbinError, match="built for the platform 'xilinx_u200'"):
        check_xclbin(make(platform="xilinx_u200"), SPEC, PLATFORM, "a.xclbin")


def test_an_xclbin_without_a_record_is_refused():
    xclbin = make()
    sections = {k: v for k, v in xclbin.sections.items() if k != SectionKind.USER_METADATA}
    with pytest.raises(XclbinError, match="does not say which kernels"):
        check_xclbin(replace(xclbin, sections=sections), SPEC, PLATFORM, "a.xclbin")


def test_a_platform_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="63"):
        make(platform="x" * 64).pack()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(XclbinError, match=r"cannot read .*none\.xclbin"):
        Xclbin.read(tmp_path / "none.xclbin")


def test_vitis_simulator_is_waited_for_longer_than_a_card():
    card, emulated = (replace(make(), mode=mode) for mode in (HARDWARE, HW_EMU))
    vitis = {"XILINX_VITIS": "/opt/vitis"}
    for usual in ((card, {}), (card, vitis), (emulated, {})):
        assert deadlines_of(*usual) == Deadlines(load=120, answer=30, progress=60)
    simulator = deadlines_of(emulated, vitis)
    assert simulator.load > 120
    assert simulator.answer > 30
    assert simulator.progress > 60


def test_a_card_names_its_shell_and_an_xclbin_the_platform():
    shell = "xilinx_u2_gen3x4_xdma_gc_base_2"
    assert shell_of(PLATFORM) == shell_of(shell) == shell
    check_xclbin(make(), SPEC, shell, "kernels.xclbin")
    for other in ("xilinx_u2_gen3x4_xdma_gc_base_1", "xilinx_u50_gen3x16_xdma_base_5", ""):
        assert shell_of(PLATFORM) != shell_of(other)
        with pytest.raises(XclbinError, match="was built for the platform"):
            check_xclbin(make(), SPEC, other, "kernels.xclbin")


def test_a_record_with_a_section_that_is_no_number_is_damage():
    own = make()
    record = own.sections[SectionKind.USER_METADATA].replace(b'"0":', b'"x":')
    assert record != own.sections[SectionKind.USER_METADATA]
    damaged = replace(own, sections={**own.sections, SectionKind.USER_METADATA: record})
    with pytest.raises(XclbinError, match="damaged"):
        check_xclbin(damaged, SPEC, PLATFORM, "kernels.xclbin")
