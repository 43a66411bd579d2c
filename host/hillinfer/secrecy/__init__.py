# SPDX-License-Identifier: Apache-2.0
"""Encryption of what lies on drives: keys, and the pages and sheets that they seal."""
