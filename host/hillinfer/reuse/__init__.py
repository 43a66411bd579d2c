# SPDX-License-Identifier: Apache-2.0
"""Prompts that a store holds, read into caches instead of computed."""
