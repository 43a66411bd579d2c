# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, read without torch: memory, processor, drive, GPU, versions."""
