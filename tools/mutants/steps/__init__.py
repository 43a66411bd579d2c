# SPDX-License-Identifier: Apache-2.0
"""Faults of passes and decode steps: what computes, what memory keeps, what is read."""
