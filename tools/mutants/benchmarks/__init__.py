# SPDX-License-Identifier: Apache-2.0
"""Faults of benchmarks and of studies."""
