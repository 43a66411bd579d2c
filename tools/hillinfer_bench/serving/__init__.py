# SPDX-License-Identifier: Apache-2.0
"""Measures the server through OpenAI's client: many at once, its own cost, restarts, a rival."""
