# SPDX-License-Identifier: Apache-2.0
"""The machine as the operating system shows it: files, memory, processor, processes."""
