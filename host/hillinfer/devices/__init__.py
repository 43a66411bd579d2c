# SPDX-License-Identifier: Apache-2.0
"""Devices that hold and score key shadows: simulated kernels, cards behind XRT, a core."""
