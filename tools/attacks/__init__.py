# SPDX-License-Identifier: Apache-2.0
"""Attacks on the command, and what must not come of them."""
