# SPDX-License-Identifier: Apache-2.0
"""Error codes of a status beat, and the error of a launch that must end with one."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """The error field of a status beat (contract, section 11)."""

    NONE = 0
    DESCRIPTOR = 1
    BUS = 2
    RESERVED_NOT_ZERO = 3


class LaunchError(ValueError):
    """A launch that a kernel must end in an error status (contract, section 11).

    Parameters
    ----------
    code
        What the status beat says.
    message
        What is wrong, with the value found.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
