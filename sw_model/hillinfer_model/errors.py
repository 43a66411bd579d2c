# SPDX-License-Identifier: Apache-2.0
"""Errors of the scoring contract."""


class NonFiniteQueryError(ValueError):
    """A query holds an infinity or a NaN, or becomes one when scaled (contract, section 4)."""
