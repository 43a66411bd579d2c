# SPDX-License-Identifier: Apache-2.0
"""Exact attention over blocks of rows."""
