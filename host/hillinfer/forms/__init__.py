# SPDX-License-Identifier: Apache-2.0
"""Ways to keep a stored document, made from its rows, and opened into caches that answer."""
