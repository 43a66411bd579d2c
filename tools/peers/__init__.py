# SPDX-License-Identifier: Apache-2.0
"""Other runtimes to compare with, each in a process of its own."""
