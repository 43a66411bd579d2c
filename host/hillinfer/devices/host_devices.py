# SPDX-License-Identifier: Apache-2.0
"""Which devices are the host itself."""

# They hold no shadow of their own: all of it lies in DRAM or on the drive.
HOST_DEVICES = frozenset({"nvme", "golden"})
