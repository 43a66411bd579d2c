# SPDX-License-Identifier: Apache-2.0
"""Generate with a real model whose tokens are scored behind the real XRT, on an emulated card.

Runs `hillinfer generate` twice, on the plain drive and with `--device xrt`, compares the tokens and
writes build/reports/hw_emu.json. Ends with 1 where a token differs or the card scored nothing, with
2 where a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hillinfer_hw.build_cache import BUILD, ROOT
from hillinfer_hw.emulation import Engine, make_surrounding
from hillinfer_hw.surrounding import Surrounding
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.xrt_installation import debian_xrt
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.presets import PRESETS, preset_spec

MODEL = "smollm2-135m"
QUESTION = "What does the text say?"
ALPHA = 0.1


def generate(folder: Path, device: str, given: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Run `hillinfer generate` and return its report."""
    report = folder / f"{device}.json"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    document = folder / "document.txt"
    document.write_text(text[: given.characters], encoding="utf-8")
    command = [
        *(sys.executable, "-c", "from hillinfer.cli.main import main; main()", "generate"),
        *("--prompt-file", str(document), "--question", QUESTION, "--alpha", str(ALPHA)),
        *("--shadow", given.mode, "--rule", given.rule, "--dram-budget", "200%"),
        *("--max-new-tokens", str(given.new_tokens), "--report", str(report)),
        *("--device", device, *more),
    ]
    environment = os.environ | {"HILLINFER_EMULATION_LOG": str(folder / "card.log")}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return content


def row_of(engine: Engine, surrounding: Surrounding, given: argparse.Namespace) -> dict[str, Any]:
    """Generate with and without the card and compare."""
    with tempfile.TemporaryDirectory(prefix="hillinfer-hw-emu-") as name:
        folder = Path(name)
        start = time.monotonic()
        card = generate(folder, "xrt", given, "--xclbin", str(surrounding.xclbin))
        seconds = time.monotonic() - start
        plain = generate(folder, "nvme", given)
        lines = (folder / "card.log").read_text(encoding="utf-8").splitlines()
    worked = [json.loads(line) for line in lines]
    return {
        "preset": MODEL,
        "mode": given.mode,
        "rule": given.rule,
        "execution": "hw_emu",
        "engine": engine.value,
        "simulator": "verilator" if engine is Engine.RTL else "g++",
        "xrt_version": debian_xrt().version,
        "kernel_launches": sum(one["launches"] for one in worked),
        "simulated_cycles": sum(one["cycles"] for one in worked),
        "device_scored_tokens": card["device_scored_tokens"],
        "scored_tokens": card["scored_tokens"],
        "prompt_tokens": card["prompt_tokens"],
        "new_tokens": card["new_tokens"],
        "tokens_equal": _tokens(card) == _tokens(plain),
        "wall_seconds": round(seconds, 1),
    }


def main() -> int:
    """Run both engines and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=list(Engine), default=list(Engine))
    parser.add_argument("--mode", choices=["int8", "int4", "int2"], default="int4")
    parser.add_argument("--rule", choices=list(Rule), default=Rule.WEIGHT_SUM.value)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--characters", type=int, default=1500, help="of the document")
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "hw_emu.json")
    given = parser.parse_args()
    assert MODEL in PRESETS
    spec = preset_spec(MODEL, KeyMode(given.mode), Rule(given.rule))
    rows: list[dict[str, Any]] = []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for engine in map(Engine, given.engine):
        folder = BUILD / "hw_emu" / f"{MODEL}-{given.mode}-{given.rule}-{engine}"
        try:
            surrounding = make_surrounding(spec, engine, folder)
        except MissingToolError as error:
            print(f"hw_emu: {error}", file=sys.stderr)
            return 2
        row = row_of(engine, surrounding, given)
        rows.append(row)
        report = {"label": "hw_emu (real XRT, emulated card)", "rows": rows}
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(
            f"{engine}: {row['prompt_tokens']} prompt and {row['new_tokens']} new tokens, "
            f"{row['kernel_launches']} launches, {row['simulated_cycles']} cycles, "
            f"{row['device_scored_tokens']} of {row['scored_tokens']} tokens scored by the card, "
            f"tokens {'equal' if row['tokens_equal'] else 'DIFFER'}, "
            f"{row['wall_seconds']} s",
            flush=True,
        )
    print(f"hw_emu: XRT {debian_xrt().version}: {given.out}")
    good = all(row["tokens_equal"] and row["device_scored_tokens"] for row in rows)
    return 0 if good else 1


def _tokens(report: dict[str, Any]) -> list[list[int]]:
    return [answer["token_ids"] for answer in report["answers"]]


if __name__ == "__main__":
    sys.exit(main())
