# SPDX-License-Identifier: Apache-2.0
"""Errors and warnings a user can act on: each names the value and the fix."""

from hillinfer.option_names import with_python_names


class HillInferError(Exception):
    """Base of every error that HillInfer raises on purpose.

    What it advises is written with the command's options; what they are called in Python is added
    where the message is read.
    """

    def __str__(self) -> str:
        return with_python_names(super().__str__())


class SettingsError(HillInferError, ValueError):
    """A setting is outside what it allows."""


class UnsupportedFeatureError(HillInferError):
    """A model or a way of generating that would give wrong answers, refused with the way out."""


class BudgetError(HillInferError):
    """The DRAM budget cannot hold what it must hold."""


class ColdPoolError(HillInferError):
    """The drive or the directory of the cold pool failed or cannot be used."""


class PageLockError(HillInferError):
    """Host memory could not be locked for a GPU; copies then go through pageable memory."""


class CacheUseError(HillInferError):
    """A cache was given something that does not continue what it holds."""


class BrokenRunError(HillInferError):
    """A run failed in the middle; what it had done until then was shown and reported."""


class HillInferWarning(UserWarning):
    """Something works, but not as well as a user may expect; worded as `HillInferError` is."""

    def __str__(self) -> str:
        return with_python_names(super().__str__())


class SetupWarning(HillInferWarning):
    """Drive and budget allow less than they should; the command says so before it starts."""
