# SPDX-License-Identifier: Apache-2.0
"""Other runtimes as rivals, each in a process of its own."""
