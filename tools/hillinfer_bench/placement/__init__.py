# SPDX-License-Identifier: Apache-2.0
"""Placement policies event by event, beside the optimum, and how long they take."""
