# SPDX-License-Identifier: Apache-2.0
"""What else keeps KV beneath vLLM: measured where it runs on this platform, and else why not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_store.engines import EngineError, Runs

_MEMORY = 1 << 30
_INSTALL_SECONDS = 600.0
# Placed into a configuration where its folder of files goes.
_FOLDER = "FOLDER"
_URL = re.compile(r"\b[a-z+]+://\S+", re.IGNORECASE)
_HOST = re.compile(r"\bhost='[^']*'")


@dataclass(frozen=True)
class Other:
    """One of them.

    Parameters
    ----------
    name
        As in the report.
    transfer
        KV transfer config.
    requirements
        What is installed for it, beside vLLM; what that needs itself has to be named.
    """

    name: str
    transfer: Mapping[str, Any]
    requirements: tuple[str, ...] = field(default=())


_TIER = {"type": "fs", "root_dir": _FOLDER}
OTHERS = (
    Other(
        "vLLM's offloading to memory",
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": _MEMORY},
        },
    ),
    Other(
        "vLLM's tiered offloading to files",
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": _MEMORY,
                "secondary_tiers": [_TIER],
            },
        },
    ),
    Other(
        "LMCache, within vLLM",
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        (
            "lmcache==0.5.6",
            # What it imports for this, of what it asks for; the rest is for accelerators.
            *("aiofile==3.12.3", "aiofiles==25.1.0", "caio==0.12.10", "awscrt==0.38.1"),
            *("nvtx==0.2.17", "redis==8.1.0", "sortedcontainers==2.4.0"),
            "opentelemetry-exporter-prometheus==0.66b2",
        ),
    ),
)


def others_report(runs: Runs, folder: Path) -> dict[str, Any]:
    """Have each of them store a prompt, and load it in another process.

    Parameters
    ----------
    runs
        Of vLLM and the prompt.
    folder
        Where their files go.
    """
    rows = []
    for number, other in enumerate(OTHERS):
        print(other.name, flush=True)
        place = folder / str(number)
        place.mkdir()
        rows.append({"name": other.name} | _measured(runs, other, place))
    return {"label": "measured on this machine, or refused on it", "rows": rows, "errors": []}


def without_places(line: str) -> str:
    """Return a line of pip's without URLs and names of machines that packages come from."""
    return _HOST.sub("host=…", _URL.sub("…", line))


# --- inside ---


def _measured(runs: Runs, other: Other, place: Path) -> dict[str, Any]:
    try:
        own = _installed(runs, other, place)
        transfer = _placed(other.transfer, place / "files")
        [stored] = own.ask(transfer)["answers"]
        [restarted] = own.ask(transfer)["answers"]
    except EngineError as error:
        return {"refused": str(error)}
    return {
        "storing_seconds": stored["first_token_seconds"],
        "first_token_seconds": restarted["first_token_seconds"],
        "cached_tokens": restarted["cached_tokens"],
        "tokens_equal": restarted["tokens"] == stored["tokens"],
    } | ({} if restarted["cached_tokens"] else {"loaded_nothing": own.said()})


def _installed(runs: Runs, other: Other, place: Path) -> Runs:
    if not other.requirements:
        return runs
    target, python = place / "packages", runs.installed.python
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(python), "install", "--quiet"]
    command = [*pip, "--no-deps", "--target", str(target), *other.requirements]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"installing took more than {_INSTALL_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        # Where packages come from is the machine's own, and goes into no report.
        raise EngineError(f"pip: {without_places((lines or ['no output'])[-1])}")
    paths = (*runs.installed.paths, target)
    return replace(runs, installed=replace(runs.installed, paths=paths))


def _placed(config: Any, folder: Path) -> Any:
    """Return a configuration whose folder is one that is there."""
    if isinstance(config, Mapping):
        return {name: _placed(one, folder) for name, one in config.items()}
    if isinstance(config, list):
        return [_placed(one, folder) for one in config]
    if config == _FOLDER:
        folder.mkdir(exist_ok=True)
        return str(folder)
    return config
