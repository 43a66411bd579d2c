# SPDX-License-Identifier: Apache-2.0
"""Answers of a form that was asked for: JSON of a schema, and calls of functions."""
