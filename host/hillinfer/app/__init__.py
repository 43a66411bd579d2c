# SPDX-License-Identifier: Apache-2.0
"""The adaptive prefetch pipeline: who scores what, and what is fetched when (section 4.3)."""
