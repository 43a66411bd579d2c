# SPDX-License-Identifier: Apache-2.0
"""Faults of prompts: read, pruned, and reused from a store."""
