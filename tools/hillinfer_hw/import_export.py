# SPDX-License-Identifier: Apache-2.0
"""Reads RTL that Vitis HLS exported, so that the same bench can run it."""

from __future__ import annotations

import re
from pathlib import Path

from hillinfer_hw.rtl_files import RtlSource

_CONTROL = "_control_s_axi.v"
_ARGUMENT = re.compile(r"^// 0x([0-9a-fA-F]+) : Data signal of (\w+)\s*$", re.MULTILINE)
_CONTINUE = re.compile(r"^//\s+bit 4\s+- ap_continue", re.MULTILINE)
_BUNDLE = re.compile(r"\bm_axi_(\w+?)_AWVALID\b")


def import_export(folder: Path) -> RtlSource:
    """Return the manifest of an export.

    Parameters
    ----------
    folder
        What the tool calls `syn/verilog`: the top module, its parts, and
        `TOP_control_s_axi.v`, whose comments hold the register map.

    Raises
    ------
    ValueError
        Where the folder is no such export; the message says what is missing.
    """
    controls = sorted(folder.glob(f"*{_CONTROL}"))
    if len(controls) != 1:
        raise ValueError(f"{folder} holds {len(controls)} files *{_CONTROL}, not one")
    top = controls[0].name.removesuffix(_CONTROL)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".v", ".sv"))
    text = controls[0].read_text()
    arguments: dict[str, int] = {}
    for offset, name in _ARGUMENT.findall(text):
        # A pointer has two words; the first is where it is written.
        arguments.setdefault(name, int(offset, 16))
    if not arguments:
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
        arguments,
        "ap_ctrl_chain" if _CONTINUE.search(text) else "ap_ctrl_hs",
        "vitis_hls",
    )
