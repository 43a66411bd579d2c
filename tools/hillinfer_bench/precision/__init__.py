# SPDX-License-Identifier: Apache-2.0
"""Which precision a selected token needs: a few in 16 bits, the others as codes."""
