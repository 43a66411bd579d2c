# SPDX-License-Identifier: Apache-2.0
"""The native library: finding, loading and calling it."""
