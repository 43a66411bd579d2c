# SPDX-License-Identifier: Apache-2.0
"""Hierarchical importance evaluation: scores in, the exact top α out (HillInfer section 4.2)."""
