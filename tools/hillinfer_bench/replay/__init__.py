# SPDX-License-Identifier: Apache-2.0
"""Selected sets recorded from a model, and how pool policies do on them."""
