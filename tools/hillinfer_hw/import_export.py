# SPDX-License-Identifier: Apache-2.0
"""Reads RTL that Vitis HLS exported, so that the same bench can run it."""

from __future__ import annotations

import re
from pathlib import Path

from hillinfer_hw.rtl_files import KERNELS, RtlSource, arguments
from hillinfer_model.kernel_spec import KernelSpec

_CONTROL = "_control_s_axi.v"
_ARGUMENT = re.compile(r"^// 0x([0-9a-fA-F]+) : Data signal of (\w+)\s*$", re.MULTILINE)
_CONTINUE = re.compile(r"^//\s+bit 4\s+- ap_continue", re.MULTILINE)
_BUNDLE = re.compile(r"\bm_axi_(\w+?)_AWVALID\b")


def import_export(folder: Path) -> RtlSource:
    """Return the manifest of an export.

    Parameters
    ----------
    folder
        What the tool calls `syn/verilog`, or the solution or project around it: the top module,
        its parts, and `TOP_control_s_axi.v`, whose comments hold the register map.

    Raises
    ------
    ValueError
        Where the folder is no such export; the message says what is missing.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    inner = sorted({*folder.glob("syn/verilog"), *folder.glob("*/syn/verilog")})
    if len(inner) > 1:
        raise ValueError(f"{folder} holds several exports: {', '.join(map(str, inner))}")
    folder = inner[0] if inner else folder
    controls = sorted(folder.glob(f"*{_CONTROL}"))
    if len(controls) != 1:
        raise ValueError(f"{folder} holds {len(controls)} files *{_CONTROL}, not one")
    vendor = sorted(path.stem for path in folder.glob("*_ip.tcl"))
    if vendor:
        raise ValueError(
            f"{folder} holds vendor IP that open simulators cannot run: {', '.join(vendor)}"
        )
    top = controls[0].name.removesuffix(_CONTROL)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".v", ".sv"))
    text = controls[0].read_text()
    offsets: dict[str, int] = {}
    for offset, name in _ARGUMENT.findall(text):
        # A pointer has two words; the first is where it is written.
        offsets.setdefault(name, int(offset, 16))
    if not offsets:
        raise ValueError(f"{controls[0].name} names no arguments in its comments")
    tops = [path for path in files if path.stem == top]
    if not tops:
        raise ValueError(f"{folder} holds no top module {top}")
    bundles = dict.fromkeys(_BUNDLE.findall(tops[0].read_text()))
    if not bundles:
        raise ValueError(f"{tops[0].name} has no m_axi ports")
    return RtlSource(
        top,
        tuple(files),
        # Exports hold `#0` in initial blocks, and warnings that are not ours to mend.
        {"verilator": ("--no-timing", "-Wno-fatal")},
        {bundle: f"m_axi_{bundle}" for bundle in bundles},
        offsets,
        "ap_ctrl_chain" if _CONTINUE.search(text) else "ap_ctrl_hs",
        "vitis_hls",
    )


def check_export(source: RtlSource, spec: KernelSpec, kernel: str) -> None:
    """Refuse an export that is not the kernel of a spec, as far as its ports show.

    What the ports do not show (head_dim, key mode, rule) shows in the status beats: they carry
    the spec's hash.

    Parameters
    ----------
    source
        Of `import_export`.
    spec, kernel
        What it should be.

    Raises
    ------
    ValueError
        With what is there and what should be.
    """
    if source.top not in KERNELS:
        raise ValueError(f"the top module is {source.top}; the bench knows {', '.join(KERNELS)}")
    if source.top != kernel:
        raise ValueError(f"the export is {source.top}, the spec is given for {kernel}")
    pointers, scalars = arguments(spec, kernel)
    expected = (*pointers, *scalars)
    if set(source.arguments) != set(expected):
        raise ValueError(
            f"the export has the arguments {', '.join(source.arguments)}; key mode "
            f"{spec.key_mode.value} has {', '.join(expected)}"
        )
