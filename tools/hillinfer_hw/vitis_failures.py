# SPDX-License-Identifier: Apache-2.0
"""Finds the line of a tool's log that says why a build failed."""

from __future__ import annotations

import re
from enum import StrEnum


class Failure(StrEnum):
    """Why a build is no use."""

    OVERFLOW = "the kernels do not fit on the device"
    TIMING = "timing is not met"
    ERROR = "the tool reports an error"


# Tools repeat each other's messages behind their own number: [DRC UTLZ-1] becomes [VPL UTLZ-1].
_OVERFLOW = re.compile(r"\bUTLZ-\d+\]|\b30-640\]|over-utilized", re.IGNORECASE)
_TIMING = re.compile(
    r"did not meet timing|failed timing targeting|frequency is being automatically changed"
    r"|fail(?:ed|s) to meet the timing|timing constraints are not met",
    re.IGNORECASE,
)
_MESSAGE = re.compile(r"^\W*(?:ERROR|CRITICAL WARNING|WARNING)\b")
_ERROR = re.compile(r"^\W*ERROR\b|: (?:fatal )?error:")
# What only says that something else went wrong.
_FOLLOWS = re.compile(r"\[(?:VPL 60-(?:773|704|1328|806)|v\+\+ 60-(?:661|702|703)|HLS 200-1715)\]")


def failure_line(log: str) -> tuple[Failure, str] | None:
    """Return the line that tells most about why a run failed, or None where no line does.

    Parameters
    ----------
    log
        What a tool printed before it ended with an error.
    """
    # Warnings about timing come in the middle of a run that goes on to mend it.
    return _known(log, _ERROR) or _first_error(log)


def cause_line(log: str) -> tuple[Failure, str] | None:
    """Return the line of an inner tool's log that names overflow or timing, or None."""
    return _known(log, _ERROR)


def silent_failure_line(log: str) -> tuple[Failure, str] | None:
    """Return the line that makes the result of a run that ended well no use, or None.

    v++ lowers the clock where a path is too slow, warns, and ends well.
    """
    return _known(log, _MESSAGE)


def _known(log: str, severity: re.Pattern[str]) -> tuple[Failure, str] | None:
    for failure, pattern in ((Failure.OVERFLOW, _OVERFLOW), (Failure.TIMING, _TIMING)):
        for line in log.splitlines():
            if pattern.search(line) and severity.search(line):
                return failure, line.strip()
    return None


def _first_error(log: str) -> tuple[Failure, str] | None:
    errors = [line.strip() for line in log.splitlines() if _ERROR.search(line)]
    causes = [line for line in errors if not _FOLLOWS.search(line)]
    return (Failure.ERROR, (causes or errors)[0]) if errors else None
