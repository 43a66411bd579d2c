# SPDX-License-Identifier: Apache-2.0
"""What a run tells: rows, goals, and reports of all benchmarks."""
