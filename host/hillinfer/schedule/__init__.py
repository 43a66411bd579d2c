# SPDX-License-Identifier: Apache-2.0
"""When the drive is read and written beside a pass: windows and rates."""
