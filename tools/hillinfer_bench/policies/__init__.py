# SPDX-License-Identifier: Apache-2.0
"""Selection policies that only measure: ideals and other systems' rules."""
