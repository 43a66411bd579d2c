# SPDX-License-Identifier: Apache-2.0
"""Small classes with one method to override."""
