# SPDX-License-Identifier: Apache-2.0
"""The hot pool and the accountant of host memory (HillInfer section 4.2, BKP)."""
