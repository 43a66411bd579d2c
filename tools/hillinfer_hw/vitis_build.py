# SPDX-License-Identifier: Apache-2.0
"""Describes a build with Vitis: kernels, spec, target, platform and frequency."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hillinfer_hw.emulation_image import kernel_instances
from hillinfer_hw.xclbin_sections import KernelInstance
from hillinfer_model.hardware_spec import check_hardware_spec
from hillinfer_model.kernel_spec import KernelSpec

LEAST_MHZ, MOST_MHZ = 50, 500


class VitisBuildError(ValueError):
    """A build that cannot be started; the message names the setting and the reason."""


class KernelSource(StrEnum):
    """What the kernels are made from."""

    HLS = "hls"
    RTL = "rtl"


class Target(StrEnum):
    """What the xclbin is for: a card, or Vitis' own emulation of one."""

    HW = "hw"
    HW_EMU = "hw_emu"


@dataclass(frozen=True)
class VitisBuild:
    """One run of Vitis, from sources to an xclbin.

    Parameters
    ----------
    name
        Name of the xclbin and its manifest, without a suffix.
    spec
        What the kernels are rendered from.
    source
        HLS C++ or RTL.
    target
        Card or emulation.
    platform
        The platform's name, or the path of its `.xpfm`.
    frequency
        Kernel clock to ask for, in MHz.
    folder
        Everything is rendered, run and left here.

    Raises
    ------
    HardwareSpecError
        Where no kernel is built for the spec.
    VitisBuildError
        Where frequency or a path is one that Vitis cannot work with.
    """

    name: str
    spec: KernelSpec
    source: KernelSource
    target: Target
    platform: str
    frequency: int
    folder: Path

    def __post_init__(self) -> None:
        """Refuse what Vitis would refuse hours later, or what it would misread."""
        check_hardware_spec(self.spec)
        if not LEAST_MHZ <= self.frequency <= MOST_MHZ:
            raise VitisBuildError(
                f"frequency={self.frequency} is outside {LEAST_MHZ}..{MOST_MHZ} MHz"
            )
        for what, path in (("build folder", str(self.folder)), ("platform", self.platform)):
            # Vivado's scripts inside of Vitis split paths at spaces.
            if any(letter.isspace() for letter in path):
                raise VitisBuildError(f"Vitis cannot work with the {what} {path!r}: it has a space")

    @property
    def instances(self) -> list[KernelInstance]:
        """The kernels, one instance each."""
        return kernel_instances(self.spec)

    @property
    def platform_name(self) -> str:
        """Name of the platform, wherever it lies; the card's shell is called the same."""
        return Path(self.platform).name.removesuffix(".xpfm")
