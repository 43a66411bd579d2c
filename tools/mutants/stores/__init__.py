# SPDX-License-Identifier: Apache-2.0
"""Faults of stores: what they keep, from whom, and for whom."""
