# SPDX-License-Identifier: Apache-2.0
"""The table of parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from attacks.files import flips, folders, images, manifests
from attacks.part import Ground, Part
from attacks.surroundings import fetches, modes, planted
from attacks.survival import drives, kills, outputs, scarce

PARTS: Mapping[str, Callable[[Ground, Part, random.Random], None]] = {
    "folders": folders,
    "manifests": manifests,
    "flips": flips,
    "images": images,
    "kills": kills,
    "fetches": fetches,
    "outputs": outputs,
    "drives": drives,
    "scarce": scarce,
    "modes": modes,
    "planted": planted,
}
