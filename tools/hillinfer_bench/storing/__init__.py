# SPDX-License-Identifier: Apache-2.0
"""Measures of the store: its speed, and what kills and damage cost it."""
