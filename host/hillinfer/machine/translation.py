# SPDX-License-Identifier: Apache-2.0
"""What an IOMMU does with the addresses of a device."""

from __future__ import annotations

from enum import StrEnum


class Translation(StrEnum):
    """What lies between a device and the bus."""

    NONE = "none in between"
    PASSED = "passes addresses as they are"
    TRANSLATED = "translates addresses"
    UNKNOWN = "in between; this kernel does not say whether it translates"

    @classmethod
    def of_group(cls, kind: str) -> Translation:
        """Read what a group of devices behind an IOMMU has in its file `type`.

        Parameters
        ----------
        kind
            The file's text; nothing where there is none, as before Linux 5.11.
        """
        if kind == "identity":
            return cls.PASSED
        return cls.TRANSLATED if kind in ("DMA", "DMA-FQ") else cls.UNKNOWN
