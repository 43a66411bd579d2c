# SPDX-License-Identifier: Apache-2.0
"""Loading models and knowing what they need."""
