# SPDX-License-Identifier: Apache-2.0
"""A machine with stand-ins for Vitis, and the tools that build with it."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

from hillinfer_hw.emulation_image import PLATFORM

ROOT = Path(__file__).resolve().parents[2]


def tool(name):
    """The module tools/NAME.py."""
    described = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def tool_main(name):
    """The main function of tools/NAME.py."""
    return tool(name).main


class VitisPlace:
    """Stand-ins on PATH that record their calls, and a platform."""

    def __init__(self, folder, monkeypatch):
        self.record = folder / "record.jsonl"
        platform = folder / "platforms" / PLATFORM
        platform.mkdir(parents=True)
        (platform / f"{PLATFORM}.xpfm").write_text("<sdx:platform/>\n")
        self.platform = platform / f"{PLATFORM}.xpfm"
        self.programs = folder / "programs"
        self.programs.mkdir()
        standin = Path(__file__).with_name("vitis_standin.py")
        for tool in ("v++", "vivado", "emconfigutil", "xclbinutil"):
            script = self.programs / tool
            line = shlex.join([sys.executable, str(standin), tool])
            script.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            script.chmod(0o755)
        rooms = ":".join(str(ROOT / room) for room in ("sw_model", "host", "tools"))
        monkeypatch.setenv("PATH", f"{self.programs}:/usr/bin:/bin")
        monkeypatch.setenv("PYTHONPATH", rooms)
        monkeypatch.setenv("PLATFORM_REPO_PATHS", f"/nowhere:{platform.parent}")
        monkeypatch.setenv("STANDIN_RECORD", str(self.record))
        monkeypatch.delenv("XILINX_VITIS", raising=False)
        self.monkeypatch = monkeypatch

    def calls(self):
        if not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text().splitlines()]
