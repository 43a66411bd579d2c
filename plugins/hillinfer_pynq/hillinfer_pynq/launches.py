# SPDX-License-Identifier: Apache-2.0
"""PYNQ as a `LaunchDevice` needs it."""

from __future__ import annotations

from hillinfer.devices.device import DeviceError
from hillinfer.devices.xrt.xclbin import XclbinError
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.launch_result import LaunchResult
from hillinfer_model.score_launch import ScoreLaunch
from hillinfer_pynq.errors import PynqError
from hillinfer_pynq.execution import PynqExecution
from hillinfer_pynq.packed_launch import packed_launch


class PynqLaunches:
    """Sends what a launch reads and nothing else, and loses the device where PYNQ fails.

    Parameters
    ----------
    execution
        Runs the launches.
    """

    def __init__(self, execution: PynqExecution) -> None:
        self._execution = execution

    def score(self, spec: KernelSpec, launch: ScoreLaunch) -> LaunchResult:
        """Run `score_tokens`.

        Raises
        ------
        DeviceError
            Where the front fails, or its folder has no room for the launch.
        """
        try:
            return self._execution.score(spec, packed_launch(spec, launch))
        except (PynqError, XclbinError, OSError) as error:
            raise DeviceError(str(error)) from error

    def close(self) -> None:
        """Let the card go."""
        self._execution.close()
