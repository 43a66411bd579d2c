# SPDX-License-Identifier: Apache-2.0
"""Which commands there are, and the options that several of them have."""
