# SPDX-License-Identifier: Apache-2.0
"""The one door to the drive: files, reads, read engines, checksums."""
