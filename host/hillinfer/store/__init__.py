# SPDX-License-Identifier: Apache-2.0
"""Stored KV: prefixes of prompts on drives, shared by requests, processes and restarts."""
