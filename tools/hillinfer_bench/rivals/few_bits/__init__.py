# SPDX-License-Identifier: Apache-2.0
"""A cache of few bits for all tokens, after KIVI, in memory and on the drive."""
