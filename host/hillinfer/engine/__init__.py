# SPDX-License-Identifier: Apache-2.0
"""One engine: ties store, shadow, selection, prefetch and attention together."""
