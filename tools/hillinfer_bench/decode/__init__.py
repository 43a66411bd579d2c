# SPDX-License-Identifier: Apache-2.0
"""Decode latency of HillInfer, its rivals and stock caches, in turns on one model."""
