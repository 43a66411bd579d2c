# SPDX-License-Identifier: Apache-2.0
"""Replicas with a store each: which has read a prompt, and the way there (`docs/hosts.md`)."""
