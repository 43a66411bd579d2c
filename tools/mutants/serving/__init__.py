# SPDX-License-Identifier: Apache-2.0
"""Faults of servers and catalogues."""
