# SPDX-License-Identifier: Apache-2.0
"""One-line faults that the tests must catch, and the command that tries them."""
