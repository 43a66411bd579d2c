# SPDX-License-Identifier: Apache-2.0
"""The table of peers: what runs them and what they are opened with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.peer_environment import PeerEnvironment

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
        Where it is installed; None for the environment that the tool runs in.
    options
        Added to the request to open.
    variables
        Of the environment, which its runtime sets itself when it is not started as it is here.
    """

    name: str
    worker: str
    environment: PeerEnvironment | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The worker's script."""
        return ROOT / f"{self.worker}.py"

    @property
    def ours(self) -> bool:
        """Whether it is HillInfer."""
        return self.worker == "hillinfer_worker"


def _hillinfer(projections: str, **changes: Any) -> dict[str, Any]:
    # The budget holds the rows of any context measured here; the worker checks that it did.
    return {
        "alpha": 0.1,
        "dram_budget": "4GiB",
        "projections": projections,
        "query": "auto",
        **changes,
    }


# As `hillinfer generate` sets it where the user does not.
_HILLINFER_VARIABLES = {"OMP_WAIT_POLICY": "passive"}
# As vLLM sets them in processes that it starts and binds to cores (`utils/ompmultiprocessing.py`).
VLLM_VARIABLES = {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}

QUANTISED = PeerEnvironment("quantised")
LLAMA_CPP = PeerEnvironment(
    "llama_cpp", hint="it is compiled here: install a C++ compiler and make or ninja"
)
VLLM = PeerEnvironment(
    "vllm",
    # Built for torch with CUDA, and vLLM imports them where it finds them.
    removed=("torchvision", "torchaudio", "torchcodec"),
    # vLLM loads them first in the processes that it starts; here it starts none.
    preloaded=("lib/libiomp5.so",),
    hint=(
        "it is for Linux on x86-64 and wants torch's build for CPUs: set PIP_EXTRA_INDEX_URL to "
        "https://download.pytorch.org/whl/cpu"
    ),
)

REFERENCE = "transformers dynamic"
PEERS = (
    Peer(
        "hillinfer",
        "hillinfer_worker",
        options=_hillinfer("stock"),
        variables=_HILLINFER_VARIABLES,
    ),
    # Nothing overlaps with it: beside the default it shows what predicting is worth.
    Peer(
        "hillinfer, true query",
        "hillinfer_worker",
        options=_hillinfer("stock", query="true"),
        variables=_HILLINFER_VARIABLES,
    ),
    # FBGEMM's products are of float32, so the rest is too; weights and rows have 16 bits.
    Peer(
        "hillinfer, fp16 projections",
        "hillinfer_worker",
        options=_hillinfer("fp16", compute="float32"),
        variables=_HILLINFER_VARIABLES,
    ),
    Peer(REFERENCE, "transformers_worker", options={"cache": "dynamic"}),
    Peer("transformers static", "transformers_worker", options={"cache": "static"}),
    Peer(
        "transformers quantised, quanto",
        "transformers_worker",
        QUANTISED,
        options={"cache": "quanto"},
    ),
    Peer("transformers quantised, hqq", "transformers_worker", QUANTISED, options={"cache": "hqq"}),
    Peer("llama.cpp", "llama_cpp_worker", LLAMA_CPP, options={"flash_attention": False}),
    Peer(
        "llama.cpp, flash attention",
        "llama_cpp_worker",
        LLAMA_CPP,
        options={"flash_attention": True},
    ),
    Peer("vllm", "vllm_worker", VLLM, variables=VLLM_VARIABLES),
)
