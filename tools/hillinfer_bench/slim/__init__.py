# SPDX-License-Identifier: Apache-2.0
"""What reading in stages saves, and which answers are left of it."""
