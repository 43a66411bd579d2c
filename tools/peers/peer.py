# SPDX-License-Identifier: Apache-2.0
"""The table of peers: what runs them and what they are opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Parameters
    ----------
    name
        As in the report.
    worker
        Script that speaks the protocol of `worker_loop`.
    environment
        Name of a requirements file; None for the environment that the tool runs in.
    options
        Added to the request to open.
    """

    name: str
    worker: str
    environment: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The worker's script."""
        return ROOT / f"{self.worker}.py"

    @property
    def requirements(self) -> Path | None:
        """The pinned requirements of the peer's environment."""
        if self.environment is None:
            return None
        return ROOT / "requirements" / f"{self.environment}.txt"


def _hillinfer(projections: str) -> dict[str, Any]:
    return {"alpha": 0.1, "dram_budget": "2GiB", "projections": projections}


OURS = "hillinfer"
REFERENCE = "transformers dynamic"
PEERS = (
    Peer(OURS, "hillinfer_worker", options=_hillinfer("stock")),
    Peer("hillinfer, fp16 projections", "hillinfer_worker", options=_hillinfer("fp16")),
    Peer(REFERENCE, "transformers_worker", options={"cache": "dynamic"}),
    Peer("transformers static", "transformers_worker", options={"cache": "static"}),
    Peer(
        "transformers quantised, quanto",
        "transformers_worker",
        "quantised",
        options={"cache": "quanto"},
    ),
    Peer(
        "transformers quantised, hqq", "transformers_worker", "quantised", options={"cache": "hqq"}
    ),
    Peer("llama.cpp", "llama_cpp_worker", "llama_cpp", options={"flash_attention": False}),
    Peer(
        "llama.cpp, flash attention",
        "llama_cpp_worker",
        "llama_cpp",
        options={"flash_attention": True},
    ),
    Peer("vllm", "vllm_worker", "vllm"),
)
