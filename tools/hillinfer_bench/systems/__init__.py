# SPDX-License-Identifier: Apache-2.0
"""What the benchmark compares: HillInfer, its rivals, stock caches."""
