# SPDX-License-Identifier: Apache-2.0
"""The adaptive prefetch pipeline (HillInfer section 4.3)."""
