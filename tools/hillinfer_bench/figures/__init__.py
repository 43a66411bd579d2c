# SPDX-License-Identifier: Apache-2.0
"""Pictures of what was measured; they need the extra `figures`."""
