# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, rivals and studies that measure HillInfer and are no part of it."""
