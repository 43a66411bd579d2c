# SPDX-License-Identifier: Apache-2.0
"""PYNQ as an execution: launches in, buffers out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hillinfer.devices.xrt.xclbin import Xclbin, check_xclbin
from hillinfer_model.beats import Beats
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import BEAT_BYTES, KernelSpec
from hillinfer_model.launch_result import STATUS_FILL, LaunchResult
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_model.shadow_launch import ShadowLaunch
from hillinfer_model.status_beat import HASH_BYTES
from hillinfer_pynq.card import Card
from hillinfer_pynq.front_process import FrontProcess
from hillinfer_pynq.host_memory import without_host_memory

PATIENCE_S = 120.0


class PynqExecution:
    """Runs launches through PYNQ's Overlay, in a process and an environment of its own.

    One front is held at a time, in `front`, for the spec that was asked for last; one that has
    failed is gone, and the next launch starts another.

    Parameters
    ----------
    python
        Interpreter of the environment that `make pynq-env` makes.
    card_of
        Returns the card that has a spec's kernels.
    patience
        Seconds in which a card must be loaded, and in which a launch must end.
    """

    name = "pynq"

    def __init__(
        self, python: Path, card_of: Callable[[KernelSpec], Card], patience: float = PATIENCE_S
    ) -> None:
        self.python, self.card_of, self.patience = python, card_of, patience
        self._spec: KernelSpec | None = None
        self.front: FrontProcess | None = None

    def load(self, spec: KernelSpec) -> None:
        """Load a spec's kernels now, not with their first launch.

        Raises
        ------
        XclbinError
            Where the card's xclbin is damaged, or for another spec or platform.
        PynqError
            Where the front does not start in time.
        """
        self._front_of(spec)

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        XclbinError
            Where the card's xclbin is damaged, or for another spec or platform.
        PynqError
            Where the front does not start, fails, or does not end in time.
        """
        buffers = {"segments": launch.segments, "shadow": launch.shadow}
        if spec.key_mode is KeyMode.FP16:
            buffers["statistics"] = launch.statistics
        buffers |= {"queries": launch.queries, "scores": launch.scores}
        scalars = {"scope": int(launch.scope), "launch_id": launch.launch_id}
        return self._run("score_tokens", spec, buffers, "scores", scalars)

    def make_shadow(self, spec: KernelSpec, launch: ShadowLaunch) -> LaunchResult:
        """Run `make_shadow`; raises as `score` does."""
        buffers = {
            "segments": launch.segments,
            "rows": launch.rows,
            "statistics": launch.statistics,
            "shadow": launch.shadow,
        }
        return self._run("make_shadow", spec, buffers, "shadow", {"launch_id": launch.launch_id})

    def close(self) -> None:
        """Let the card go."""
        if self.front is not None:
            self.front.close()
        self.front = None

    def _run(
        self,
        kernel: str,
        spec: KernelSpec,
        buffers: dict[str, Beats],
        output: str,
        scalars: dict[str, int],
    ) -> LaunchResult:
        segments = buffers["segments"].shape[0]
        status = np.full((segments, BEAT_BYTES), STATUS_FILL, dtype=np.uint8)
        return LaunchResult(
            *self._front_of(spec).launch(
                kernel,
                {**buffers, "status": status},
                {"segment_count": segments, **scalars},
                (output, "status"),
                self.patience,
            )
        )

    def _front_of(self, spec: KernelSpec) -> FrontProcess:
        if self.front is not None and self.front.running and self._spec == spec:
            return self.front
        self.close()
        card = self.card_of(spec)
        name = str(card.xclbin)
        xclbin = Xclbin.read(card.xclbin)
        check_xclbin(xclbin, spec, card.platform, name)
        # The front loads the bytes that were checked, not what the file holds by then.
        content = without_host_memory(xclbin, spec, name).pack()
        spec_hash = spec.digest()[:HASH_BYTES].hex()
        self.front = FrontProcess(
            self.python, content, card.platform, spec_hash, card.environment, self.patience
        )
        self._spec = spec
        return self.front
