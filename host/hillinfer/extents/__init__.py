# SPDX-License-Identifier: Apache-2.0
"""Extents of stores as part of a cold pool: read where they lie, filled as rows are made."""
