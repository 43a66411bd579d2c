# SPDX-License-Identifier: Apache-2.0
"""Tasks that need no network: their texts are Python's own help and made-up lines."""
