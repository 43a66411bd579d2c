# SPDX-License-Identifier: Apache-2.0
"""Key shadows: INT8 or INT4 codes of keys, in DRAM or on the drive."""
