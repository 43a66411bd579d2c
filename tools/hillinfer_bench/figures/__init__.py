# SPDX-License-Identifier: Apache-2.0
"""Plots of measurements; they need the extra `figures`."""
