# SPDX-License-Identifier: Apache-2.0
"""Placement policies beside the optimum, and how long they take."""
