# SPDX-License-Identifier: Apache-2.0
"""An xclbin with all that this project reads, and no kernels."""

from uuid import UUID

from hillinfer.devices.xrt.xclbin import HW_EMU, SectionKind, Xclbin, spec_record
from hillinfer_hw.xclbin_sections import (
    Connection,
    KernelInstance,
    MemoryBank,
    MemoryType,
    pack_banks,
    pack_connections,
    pack_instances,
)
from hillinfer_model.kernel_spec import KernelSpec

PLATFORM = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
SPEC = KernelSpec(64, 3, 3)
BANKS = [MemoryBank("bank0", MemoryType.DDR4, 4 << 30, 0)]
INSTANCES = [
    KernelInstance("score_tokens", "score_tokens_1", 0x1800000),
    KernelInstance("make_shadow", "make_shadow_1", 0x1810000),
]
CONNECTIONS = [Connection(argument, 0, 0) for argument in range(5)]


def make(spec=SPEC, platform=PLATFORM, mode=HW_EMU):
    sections = {
        SectionKind.BITSTREAM: b"bits" * 1001,
        SectionKind.MEM_TOPOLOGY: pack_banks(BANKS),
        SectionKind.IP_LAYOUT: pack_instances(INSTANCES),
        SectionKind.CONNECTIVITY: pack_connections(CONNECTIONS),
    }
    sections[SectionKind.USER_METADATA] = spec_record(spec, sections)
    return Xclbin(platform, UUID(int=77), mode, sections)
