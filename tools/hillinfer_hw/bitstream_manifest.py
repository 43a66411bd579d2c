# SPDX-License-Identifier: Apache-2.0
"""The manifest beside an xclbin, and putting both where they are kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hillinfer.devices.xrt.xclbin import Xclbin
from hillinfer_hw.bitstream_evidence import Evidence
from hillinfer_hw.hls_report import HlsReport
from hillinfer_hw.vitis_build import VitisBuild
from hillinfer_hw.vitis_flow import Step, finished_xclbin

FORMAT = "hillinfer-bitstream-1"


def manifest(
    build: VitisBuild, evidence: Evidence, tools: Mapping[str, str], steps: Sequence[Step]
) -> dict[str, Any]:
    """Return the manifest of a finished build.

    Parameters
    ----------
    build
        Finished: its xclbin is in its folder, the spec record in it.
    evidence
        What its reports say.
    tools
        Version of each program.
    steps
        The commands that were run.
    """
    path = build.folder / finished_xclbin(build)
    timing = evidence.timing
    return {
        "format": FORMAT,
        "name": build.name,
        "spec": asdict(build.spec),
        "spec_hash": build.spec.digest().hex(),
        "contract_version": build.spec.contract_version,
        "kernels": build.source,
        "instances": [f"{own.kernel}:{own.instance}" for own in build.instances],
        "target": build.target,
        "platform": build.platform_name,
        "tools": dict(tools),
        "frequency": {
            "asked_mhz": build.frequency,
            "clock_mhz": evidence.clock_mhz,
            "setup_slack_ns": timing and timing.setup_ns,
            "hold_slack_ns": timing and timing.hold_ns,
        },
        "hls": {kernel: _hls_entry(report) for kernel, report in evidence.hls.items()},
        "utilisation": {
            name: {
                "used": own.used,
                "available": own.available,
                "share": round(own.share, 4),
            }
            for name, own in evidence.cells.items()
        },
        "kernel_utilisation": {name: dict(own) for name, own in evidence.kernel_cells.items()},
        "xclbin": {
            "file": path.name,
            "uuid": str(Xclbin.read(path).uuid),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
        "warnings": list(evidence.warnings),
        "commands": [step.line for step in steps],
    }


def publish(build: VitisBuild, content: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Copy a finished xclbin and its manifest to where they are kept, both or neither.

    Parameters
    ----------
    build
        Finished.
    content
        Its manifest.
    out
        Folder; made where it is missing. An earlier build of the name is replaced.

    Returns
    -------
    Paths of the xclbin and the manifest.
    """
    out.mkdir(parents=True, exist_ok=True)
    xclbin, described = out / f"{build.name}.xclbin", out / f"{build.name}.json"
    new = [path.with_name(f".{path.name}.new") for path in (xclbin, described)]
    try:
        shutil.copyfile(build.folder / finished_xclbin(build), new[0])
        new[1].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for source, target in zip(new, (xclbin, described), strict=True):
            source.replace(target)
    finally:
        for path in new:
            path.unlink(missing_ok=True)
    return xclbin, described


def _hls_entry(report: HlsReport) -> dict[str, Any]:
    return {
        "target_clock_ns": report.target_clock_ns,
        "estimated_clock_ns": report.estimated_clock_ns,
        "latency_cycles": list(report.latency_cycles),
        "resources": dict(report.resources),
        "loops": [asdict(loop) for loop in report.loops],
    }
