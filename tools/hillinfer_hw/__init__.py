# SPDX-License-Identifier: Apache-2.0
"""Renders, builds and runs the hardware half; tools of the repository, not of the wheel."""
