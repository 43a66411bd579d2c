# SPDX-License-Identifier: Apache-2.0
"""Packs an xclbin for XRT's hw_emu: the kernels' descriptions and the device process's files."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from uuid import UUID

from hillinfer.devices.xrt.xclbin import HW_EMU, SectionKind, Xclbin, spec_record
from hillinfer_hw.kernel_xml import kernel_xml
from hillinfer_hw.rtl_files import KERNELS, arguments
from hillinfer_hw.xclbin_sections import (
    Connection,
    KernelInstance,
    MemoryBank,
    MemoryType,
    pack_banks,
    pack_connections,
    pack_instances,
)
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import KernelSpec

PLATFORM = "xilinx_u2_gen3x4_xdma_gc_2_202110_1"
DDR_BYTES = 4 << 30
# A card's one memory, and host memory that kernels reach through the slave bridge.
BANKS = (
    MemoryBank("bank0", MemoryType.DDR4, DDR_BYTES, 0),
    MemoryBank("HOST[0]", MemoryType.HOST, 16 << 30, 1 << 40),
)
FIRST_REGISTERS, NEXT_REGISTERS = 0x1800000, 0x10000
# XRT unpacks the bitstream and starts simulate.sh in a folder of one of the names it knows.
FOLDER = "behav_waveform/xsim"
START_SCRIPT = "simulate.sh"


def kernel_instances(spec: KernelSpec) -> list[KernelInstance]:
    """Return the kernels of a spec: FP16 rows are scored as they are, other modes need a shadow."""
    names = [name for name in KERNELS if name == KERNELS[0] or spec.key_mode is not KeyMode.FP16]
    return [
        KernelInstance(name, f"{name}_1", FIRST_REGISTERS + index * NEXT_REGISTERS)
        for index, name in enumerate(names)
    ]


def emulation_image(spec: KernelSpec, files: Mapping[str, bytes]) -> Xclbin:
    """Return an xclbin for hw_emu.

    Parameters
    ----------
    spec
        What its kernels were rendered from.
    files
        Content of the device process's folder by name; `simulate.sh` starts it.

    Raises
    ------
    ValueError
        Without a `simulate.sh` that names its interpreter.
    """
    if not files.get(START_SCRIPT, b"").startswith(b"#!"):
        raise ValueError(f"an emulation image needs a {START_SCRIPT} that starts with #!")
    instances = kernel_instances(spec)
    connections = [
        Connection(argument, index, 0)
        for index, instance in enumerate(instances)
        for argument in range(len(arguments(spec, instance.kernel)[0]))
    ]
    sections: dict[int, bytes] = {
        SectionKind.BITSTREAM: _archive(files),
        SectionKind.EMBEDDED_METADATA: kernel_xml(spec, instances, PLATFORM),
        SectionKind.MEM_TOPOLOGY: pack_banks(BANKS),
        SectionKind.IP_LAYOUT: pack_instances(instances),
        SectionKind.CONNECTIVITY: pack_connections(connections),
    }
    sections[SectionKind.USER_METADATA] = spec_record(spec, sections)
    content = b"".join(sections.values())
    return Xclbin(PLATFORM, UUID(bytes=hashlib.sha256(content).digest()[:16]), HW_EMU, sections)


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return a zip of the files, the same bytes for the same content."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{FOLDER}/{name}", (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o700 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
