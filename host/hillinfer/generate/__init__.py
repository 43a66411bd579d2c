# SPDX-License-Identifier: Apache-2.0
"""Prompts, the decode loop, answers and the report of a run."""
