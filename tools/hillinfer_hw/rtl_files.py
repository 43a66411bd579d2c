# SPDX-License-Identifier: Apache-2.0
"""The RTL of a kernel: its sources, rendered for a spec, and their manifest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hillinfer_hw.build_cache import ROOT, cached
from hillinfer_hw.render import render
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle

RTL = ROOT / "hw" / "rtl"
KERNELS = ("score_tokens", "make_shadow")
BUNDLES = ("gmem0", "gmem1", "gmem2")
FIRST_ARGUMENT = 0x10


@dataclass(frozen=True)
class RtlSource:
    """RTL of one kernel that a bench can run.

    Parameters
    ----------
    top
        Name of the top module.
    files
        Sources, in any order.
    flags
        Further simulator flags by simulator name.
    bundles
        Prefix of each memory bundle's ports.
    arguments
        Offset of each argument's register.
    control
        `ap_ctrl_chain` or `ap_ctrl_hs`.
    origin
        `hand` for this project's RTL, `vitis_hls` for an export. Only `hand` may be held to a
        number of cycles.
    """

    top: str
    files: tuple[Path, ...]
    flags: dict[str, tuple[str, ...]]
    bundles: dict[str, str]
    arguments: dict[str, int]
    control: str
    origin: str

    def to_json(self) -> str:
        """Return the manifest's text."""
        fields = {**self.__dict__, "files": [str(path) for path in self.files]}
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RtlSource:
        """Read a manifest.

        Raises
        ------
        ValueError
            Where a field is missing or unknown.
        """
        fields = json.loads(text)
        known = set(cls.__dataclass_fields__)
        if set(fields) != known:
            raise ValueError(f"a manifest has the fields {sorted(known)}, not {sorted(fields)}")
        return cls(
            fields["top"],
            tuple(Path(name) for name in fields["files"]),
            {name: tuple(flags) for name, flags in fields["flags"].items()},
            fields["bundles"],
            fields["arguments"],
            fields["control"],
            fields["origin"],
        )


def arguments(spec: KernelSpec, kernel: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a kernel's pointer and scalar arguments, in order of their registers."""
    if kernel == "make_shadow":
        pointers = ("segments", "rows", "statistics", "shadow", "status")
        return pointers, ("segment_count", "launch_id")
    statistics = ("statistics",) if spec.key_mode is KeyMode.FP16 else ()
    pointers = ("segments", "shadow", *statistics, "queries", "scores", "status")
    return pointers, ("segment_count", "scope", "launch_id")


def argument_offsets(spec: KernelSpec, kernel: str) -> dict[str, int]:
    """Return the register offset of each argument, as Vitis HLS gives them."""
    pointers, scalars = arguments(spec, kernel)
    offsets = {name: FIRST_ARGUMENT + 12 * index for index, name in enumerate(pointers)}
    first = FIRST_ARGUMENT + 12 * len(pointers)
    return offsets | {name: first + 8 * index for index, name in enumerate(scalars)}


def render_rtl(spec: KernelSpec, kernel: str) -> RtlSource:
    """Render a kernel's RTL for a spec, into the build folder.

    Parameters
    ----------
    spec
        Shape and key mode; checked before anything is rendered.
    kernel
        One of `KERNELS`.

    Raises
    ------
    ValueError
        Where hardware cannot have the spec, or the key mode has no such kernel.
    """
    if kernel not in KERNELS:
        raise ValueError(f"no kernel is named {kernel!r}; there are {', '.join(KERNELS)}")
    if kernel == "make_shadow" and spec.key_mode is KeyMode.FP16:
        raise ValueError("key mode fp16 scores rows as they are: it has no make_shadow")
    top = render(RTL / f"{kernel}.sv.j2", spec, **rtl_context(spec, kernel))

    def write(folder: Path) -> None:
        (folder / f"{kernel}.sv").write_text(top)

    folder = cached("rtl-top", [kernel.encode(), top.encode()], write)
    return RtlSource(
        kernel,
        (*sorted(RTL.glob("*.sv")), folder / f"{kernel}.sv"),
        {},
        {bundle: f"m_axi_{bundle}" for bundle in BUNDLES},
        argument_offsets(spec, kernel),
        "ap_ctrl_chain",
        "hand",
    )


def rtl_context(spec: KernelSpec, kernel: str) -> dict[str, Any]:
    """Return what the templates are rendered from."""
    pointers, scalars = arguments(spec, kernel)
    rows = spec.key_mode is KeyMode.FP16
    return {
        "pointers": pointers,
        "scalars": scalars,
        "kind": 2 if kernel == "make_shadow" else int(rows),
        "head_dim": spec.padded_head_dim,
        "kv_heads": spec.kv_heads,
        "scored_heads": spec.scored_heads,
        "heads_per_kv": spec.scored_heads // spec.kv_heads,
        "code_bits": spec.key_mode.code_bits,
        "mode": int(rows),
        "rule": int(spec.rule is Rule.WEIGHT_SUM),
        "style": int(spec.product_style is ProductStyle.LUT),
        "segment_tokens": spec.segment_tokens,
        "block_tokens": spec.block_tokens,
        "group_beats": spec.group_beats,
        "queries": 1 if kernel == "make_shadow" else spec.queries,
    }
