# SPDX-License-Identifier: Apache-2.0
"""Rows of keys and values, in memory and in files on a drive."""
