# SPDX-License-Identifier: Apache-2.0
"""Records what a run did and when, and writes it to files."""
