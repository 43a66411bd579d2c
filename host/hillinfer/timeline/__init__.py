# SPDX-License-Identifier: Apache-2.0
"""What happened to the hot pools, step by step, as a file."""
