# SPDX-License-Identifier: Apache-2.0
"""Which form each stored document takes, and where it lies: by utility, within budgets."""
