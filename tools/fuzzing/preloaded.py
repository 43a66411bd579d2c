# SPDX-License-Identifier: Apache-2.0
"""Gets a process ready to fork: all imports done, no thread but one."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_TESTS = Path(__file__).parents[2] / "tests" / "host"


def preload() -> None:
    """Import what inputs need, quietly, with one compute thread.

    Raises
    ------
    RuntimeError
        Where a second thread runs: a fork copies only one.
    """
    # Threads of libraries would not live on in forked processes.
    os.environ.update(
        TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1", OMP_NUM_THREADS="1", MPLBACKEND="agg"
    )
    for folder in (_TESTS, _TESTS / "faults"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from hillinfer.cli.console import quiet_transformers

    quiet_transformers()
    # Each of them takes a while, once here or once in every process.
    import gguf  # noqa: F401
    import safetensors.torch  # noqa: F401
    from matplotlib import pyplot  # noqa: F401
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import hillinfer
    import hillinfer.cli.run  # noqa: F401
    import hillinfer_bench.figures.timeline_figures  # noqa: F401

    # Bars start a thread that watches them.
    tqdm.monitor_interval = 0

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"{threads} threads run, and fork copies only one")
