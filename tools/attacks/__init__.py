# SPDX-License-Identifier: Apache-2.0
"""Attacks on the command, and checks that they do no harm."""
