# SPDX-License-Identifier: Apache-2.0
"""Faults of the golden model, of kernels and of cards."""
