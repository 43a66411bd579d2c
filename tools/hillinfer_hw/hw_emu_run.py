# SPDX-License-Identifier: Apache-2.0
"""Generates with and without an emulated card, and compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hillinfer_hw.build_cache import ROOT
from hillinfer_hw.emulated_card import EmulatedCard
from hillinfer_hw.emulation import Engine
from hillinfer_hw.generation_setting import GenerationSetting

QUESTION = "What does the text say?"
ALPHA = 0.1
# One behind the other: the document is cut from them.
DOCUMENTS = ("README.md", "docs/architecture.md")
# A model of this type has FP16 rows, which a card makes shadows of.
NUMBER_TYPE = "float32"

# Runs a command to its end, with all of its variables.
Run = Callable[[Sequence[str], Mapping[str, str]], None]


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command; its text is not shown, what it says of itself is.

    Raises
    ------
    RuntimeError
        Where it fails.
    """
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"hillinfer generate ended with {done.returncode}")


def compared_row(
    setting: GenerationSetting, engine: Engine, card: EmulatedCard, run: Run
) -> dict[str, Any]:
    """Generate with the card and on the plain drive; return a row of the report.

    Parameters
    ----------
    setting
        With what is generated.
    engine
        What the card's kernels were made from.
    card
        Made with the same setting.
    run
        Runs `hillinfer generate`.
    """
    with tempfile.TemporaryDirectory(prefix="hillinfer-hw-emu-") as name:
        folder = Path(name)
        text = "".join((ROOT / one).read_text(encoding="utf-8") for one in DOCUMENTS)
        (folder / "document.txt").write_text(text[: setting.characters], encoding="utf-8")
        variables = os.environ | card.environment
        start = time.monotonic()
        command = _command(folder, setting, "xrt", "--xclbin", str(card.xclbin))
        run(command, variables)
        seconds = time.monotonic() - start
        run(_command(folder, setting, "nvme"), variables)
        with_card, plain = (
            json.loads(_report(folder, device).read_text(encoding="utf-8"))
            for device in ("xrt", "nvme")
        )
    work = card.work(with_card)
    return {
        "preset": setting.preset,
        "mode": setting.mode,
        "rule": setting.rule,
        "execution": "hw_emu",
        "engine": engine,
        "simulator": card.simulator,
        "xrt_version": card.xrt_version,
        "kernel_launches": work.launches,
        "simulated_cycles": work.cycles,
        "device_scored_tokens": with_card["device_scored_tokens"],
        "device_lost": with_card["device_lost"],
        "scored_tokens": with_card["scored_tokens"],
        "segments_per_launch": round(
            with_card["device_scored_segments"] / max(with_card["kernel_launches"], 1), 2
        ),
        "p2p_bytes": with_card["device_read_bytes"],
        "make_shadow_launches": with_card["make_shadow_launches"],
        "shared_launches": with_card["shared_launches"],
        "cold_rows_read": with_card["cold_rows_read"],
        "prompt_tokens": with_card["prompt_tokens"],
        "new_tokens": with_card["new_tokens"],
        "tokens_equal": _tokens(with_card) == _tokens(plain),
        "wall_seconds": round(seconds, 1),
    }


def _command(folder: Path, setting: GenerationSetting, device: str, *more: str) -> list[str]:
    # What a card casts the host has as codes.
    shadow = setting.mode.codes if device == "nvme" else setting.mode
    return [
        *(sys.executable, "-Pc", "from hillinfer.cli.main import main; main()", "generate"),
        *("--prompt-file", str(folder / "document.txt"), "--question", QUESTION),
        *("--alpha", str(ALPHA), "--shadow", shadow, "--rule", setting.rule),
        *("--dram-budget", "32MiB", "--max-new-tokens", str(setting.new_tokens)),
        *("--dtype", NUMBER_TYPE),
        *("--report", str(_report(folder, device)), "--device", device, *more),
    ]


def _report(folder: Path, device: str) -> Path:
    return folder / f"{device}.json"


def _tokens(report: Mapping[str, Any]) -> list[list[int]]:
    return [answer["token_ids"] for answer in report["answers"]]
