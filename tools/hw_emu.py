# SPDX-License-Identifier: Apache-2.0
"""Generate with a real model whose tokens are scored behind the real XRT, on an emulated card.

Where Vitis is on PATH, it builds and emulates the card, else this project's own program does.
`hillinfer generate` runs twice, on the plain drive and with `--device xrt`; the tokens are compared
and build/reports/hw_emu.json is written. Ends with 1 where a token differs, the card scored nothing
or a tool fails, with 2 where a tool is missing or a setting is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hillinfer.devices.xrt.xclbin import XclbinError
from hillinfer_hw.build_cache import BUILD
from hillinfer_hw.emulation import Engine
from hillinfer_hw.emulation_image import PLATFORM
from hillinfer_hw.emulator import Emulator, EmulatorName, usual_emulator
from hillinfer_hw.generation_setting import GenerationSetting
from hillinfer_hw.hw_emu_report import hw_emu_report, shown_row
from hillinfer_hw.hw_emu_run import Run, compared_row, run_command
from hillinfer_hw.own_emulator import OwnEmulator
from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.vitis_emulator import VitisEmulator
from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.offsets import RECENT_TOKENS
from hillinfer_model.presets import preset_spec

MODEL = "smollm2-135m"
CANNOT_START = 2
SEGMENT_TOKENS = preset_spec(MODEL, KeyMode.INT4, Rule.WEIGHT_SUM).segment_tokens
_AUTO = "auto"


def main(
    argv: Sequence[str] | None = None,
    run: Run = run_command,
    make_own: Callable[[Path], Emulator] = OwnEmulator,
) -> int:
    """Generate with the cards of all engines and write the report.

    Parameters
    ----------
    argv
        Options; the process' own without them.
    run
        Runs `hillinfer generate`.
    make_own
        Makes the project's own emulator, given the folder below which it makes cards.
    """
    given = _parser().parse_args(argv)
    setting = GenerationSetting(
        MODEL, KeyMode(given.mode), Rule(given.rule), given.new_tokens, given.characters
    )
    try:
        emulator = _emulator(given, make_own)
        return _generate(emulator, setting, [*map(Engine, given.engine)], given.out, run)
    except MissingToolError as error:
        print(f"hw_emu: {error}", file=sys.stderr)
        return CANNOT_START
    except (XclbinError, RuntimeError, OSError) as error:
        # BuildFailedError is a RuntimeError.
        print(f"hw_emu: failed: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        # HardwareSpecError and VitisBuildError are ValueErrors.
        print(f"hw_emu: {error}", file=sys.stderr)
        return CANNOT_START
    except KeyboardInterrupt:
        print("hw_emu: interrupted", file=sys.stderr)
        return 1


def _generate(
    emulator: Emulator, setting: GenerationSetting, engines: Sequence[Engine], out: Path, run: Run
) -> int:
    emulator.check(setting, engines)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for engine in engines:
        rows.append(compared_row(setting, engine, emulator.card(setting, engine), run))
        report = hw_emu_report(emulator, rows)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(shown_row(rows[-1]), flush=True)
    print(f"{emulator.label}: XRT {rows[0]['xrt_version']}: {out}")
    return 0 if all(_good(row) for row in rows) else 1


def _good(row: Mapping[str, Any]) -> bool:
    """Say whether the card did all of its work to the end, and what came out is right.

    Of a document without a full segment there are no shadows to be made, and of FP16 keys, which
    the card casts, there never are.
    """
    made = row["p2p_bytes"] and (row["make_shadow_launches"] or row["mode"] is KeyMode.FP16)
    return bool(
        row["tokens_equal"]
        and row["device_scored_tokens"]
        and not row["device_lost"]
        and (made or row["prompt_tokens"] < SEGMENT_TOKENS + RECENT_TOKENS)
    )


def _emulator(given: argparse.Namespace, make_own: Callable[[Path], Emulator]) -> Emulator:
    name = usual_emulator() if given.emulator == _AUTO else EmulatorName(given.emulator)
    if name is EmulatorName.VITIS:
        return VitisEmulator(given.build, given.platform)
    return make_own(given.build)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", nargs="+", choices=list(Engine), default=list(Engine))
    parser.add_argument(
        "--emulator",
        choices=[_AUTO, *EmulatorName],
        default=_AUTO,
        help="auto: vitis where v++ is on PATH, else own",
    )
    parser.add_argument("--mode", choices=list(KeyMode), default=KeyMode.INT4.value)
    parser.add_argument("--rule", choices=list(Rule), default=Rule.WEIGHT_SUM.value)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--characters", type=int, default=16_000, help="of the document")
    parser.add_argument(
        "--platform", default=PLATFORM, help="for Vitis: a name, or the path of an .xpfm"
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="where cards are built")
    parser.add_argument("--out", type=Path, default=BUILD / "reports" / "hw_emu.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
