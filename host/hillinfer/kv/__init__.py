# SPDX-License-Identifier: Apache-2.0
"""The store of KV rows: sequences, cold pool, hot pools, and rows by position."""
