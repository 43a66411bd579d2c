# SPDX-License-Identifier: Apache-2.0
"""Rows of a model that computes on a GPU: staged in page-locked memory, copied beside compute."""
