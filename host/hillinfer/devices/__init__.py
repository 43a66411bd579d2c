# SPDX-License-Identifier: Apache-2.0
"""What owns a drive and may hold and score segments."""
