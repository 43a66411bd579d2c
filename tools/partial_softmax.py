# SPDX-License-Identifier: Apache-2.0
"""Says what a card would gain by returning coded tokens' partial softmax; modelled, not measured.

python tools/partial_softmax.py --tokens 32768 131072 --host-scoring 27 --host-coded 2.6

Times and bytes come of the cycle model and of the rates given. Area is a yosys estimate of the
parts in `hw/partial_softmax`, whose bits tests compare with golden's, beside the ports and buffers
of `score_tokens`; `--areas` maps the parts again and stores their counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hillinfer_hw.area_table import stored_area
from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.rtl_files import RTL
from hillinfer_hw.synth import CAVEATS, Area, core_parameters, synthesise
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.coded_attention import BLOCK_TOKENS
from hillinfer_model.coded_cycles import OUTPUT_LANES, Banks, product_beats
from hillinfer_model.hardware_spec import BEAT_BITS, OnChipMemory
from hillinfer_model.kernel_figures import P2P_ROOF
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.partial_softmax_figures import Rates, Step, Way, WayFigures, way_figures
from hillinfer_model.presets import PRESETS, preset_spec
from hillinfer_model.value_layout import code_row_bytes

PARTS = ROOT / "hw" / "partial_softmax"
STORED = PARTS / "areas.json"
BASELINES = RTL / "baselines.json"
# The parts are mapped for this shape.
PRESET = "llama-3.1-8b"
STYLES = {"dsp": 0, "lut": 1}

# --- Area ---


def map_parts(spec: KernelSpec) -> dict[str, Area]:
    """Return the counts of every part, and of the scoring core that the parts stand in for."""
    files = sorted(PARTS.glob("*.sv"))
    shape = {"HEADS": spec.group_size, "CHANNELS": spec.head_dim}
    made = {name: synthesise(name, files, {}) for name in _COUNTED}
    for style, number in STYLES.items():
        made[f"value_sums {style}"] = synthesise("value_sums", files, shape | {"STYLE": number})
    core = core_parameters(spec, "score_tokens")
    made["score_core"] = synthesise("score_core", sorted(RTL.glob("*.sv")), core)
    return made


_COUNTED = ("coded_weight", "block_output", "moved_sum")


def buffers(spec: KernelSpec) -> list[OnChipMemory]:
    """Return the block RAMs' contents: two blocks' codes and products, and the running outputs."""
    codes = BLOCK_TOKENS * code_row_bytes(spec) // BEAT_BYTES
    channels = spec.query_heads * spec.head_dim
    return [
        OnChipMemory("codes", 1, BEAT_BITS, 2 * codes),
        OnChipMemory("products", 1, BEAT_BITS, 2 * product_beats(BLOCK_TOKENS, spec)),
        OnChipMemory("outputs", 1, 32 * OUTPUT_LANES, -(-channels // OUTPUT_LANES)),
    ]


def kernel_area(spec: KernelSpec, parts: Mapping[str, Area], kernel: Area, style: str) -> Area:
    """Return the estimate of a kernel: the parts, and what `score_tokens` has around its core.

    Parameters
    ----------
    spec
        The model's shape.
    parts
        Of `map_parts`.
    kernel
        A whole `score_tokens`.
    style
        `dsp` or `lut`: what multiplies codes.
    """
    core = parts["score_core"]
    # Weights are made twice: relative to R for U, then relative to U.
    counted = {
        "coded_weight": 2 * spec.group_size,
        "block_output": OUTPUT_LANES,
        "moved_sum": OUTPUT_LANES,
        f"value_sums {style}": 1,
    }

    def total(field: str) -> float:
        around = getattr(kernel, field) - getattr(core, field)
        return around + sum(getattr(parts[name], field) * n for name, n in counted.items())

    blocks = total("bram36") + sum(memory.block_rams for memory in buffers(spec))
    return Area(int(total("lut")), int(total("ff")), int(total("dsp")), blocks, int(total("uram")))


def areas(spec: KernelSpec, stored: Mapping[str, Area]) -> dict[str, Area]:
    """Return what stands beside what on a card: the kernels that there are, and the new one."""
    baselines = json.loads(BASELINES.read_text())
    kernel = stored_area(baselines[f"score_tokens {PRESET} int4 weight_sum"])
    return {
        "score_tokens": kernel,
        "make_shadow": stored_area(baselines[f"make_shadow {PRESET} int4 -"]),
        **{
            f"attend, {style} products": kernel_area(spec, stored, kernel, style)
            for style in STYLES
        },
    }


# --- The table ---


def line(figures: WayFigures, banks: Banks, layers: int) -> str:
    """Return one way's line: of one layer, and the time of all of them."""
    score = f"{figures.score.cycles:,}" if figures.score else "-"
    attend = f"{figures.attend.cycles:,}" if figures.attend else "-"
    beats = f"{figures.attend.beats:,}" if figures.attend else "-"
    return (
        f"| {figures.way.value} | {banks.value if figures.score else '-'} "
        f"| {figures.link_bytes:,} | {figures.coded_bytes:,} | {figures.card_bytes_moved:,} "
        f"| {score} | {beats} | {attend} | {figures.seconds * 1e3:.2f} "
        f"| {figures.seconds * layers * 1e3:.0f} | {figures.host_seconds * 1e3:.2f} "
        f"| {figures.card_tokens:,} | {figures.host_bytes:,} |"
    )


HEAD = (
    "| way | banks | bytes over PCIe | for coded tokens | card DDR bytes | score cycles "
    "| attend beats | attend cycles | ms a layer | ms a step | host thread ms | tokens on a card "
    "| host bytes a token and layer |\n|---|---|" + "---:|" * 11
)


def main() -> None:
    """Print the tables and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--alpha", type=float, default=0.2)
    parser.add_argument("--exact", type=float, default=0.02)
    parser.add_argument("--host-scoring", type=float, required=True, help="GB/s of a thread")
    parser.add_argument("--host-coded", type=float, required=True, help="GB/s of a thread")
    parser.add_argument("--launch", type=float, default=50.0, help="microseconds, assumed")
    parser.add_argument("--areas", action="store_true", help="map the parts again")
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "partial_softmax.json")
    options = parser.parse_args()
    spec = preset_spec(PRESET, KeyMode.INT4, Rule.WEIGHT_SUM)
    layers = PRESETS[PRESET].layers
    rates = Rates(options.host_scoring * 1e9, options.host_coded * 1e9, options.launch * 1e-6)
    print(f"{PRESET}, modelled: link {P2P_ROOF / 1e9:g} GB/s, {options.launch:g} us a launch")
    report: list[dict[str, object]] = []
    for tokens in options.tokens:
        print(f"\n{tokens:,} tokens:\n\n{HEAD}")
        step = Step(tokens, options.alpha, options.exact)
        for banks in Banks:
            for way in Way:
                if way is Way.HOST and banks is not Banks.ONE:
                    continue
                figures = way_figures(spec, layers, step, way, rates, banks)
                print(line(figures, banks, layers))
                report.append({"tokens": tokens, "banks": banks.value, **asdict(figures)})
    if options.areas:
        made = {name: asdict(area) for name, area in map_parts(spec).items()}
        STORED.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")
    stored = {name: Area(**counts) for name, counts in json.loads(STORED.read_text()).items()}
    print(
        "\nArea, yosys estimate:\n\n| kernel | DSP | LUT | FF | BRAM36 |\n|---|---:|---:|---:|---:|"
    )
    for name, area in areas(spec, stored).items():
        print(
            f"| {name} | {area.dsp} ({area.dsp_share:.1%}) | {area.lut:,} ({area.lut_share:.1%}) "
            f"| {area.ff:,} | {area.bram36:g} |"
        )
    print(CAVEATS)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"label": "modelled", "rows": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
