# SPDX-License-Identifier: Apache-2.0
"""Everything that touches transformers caches and models."""
