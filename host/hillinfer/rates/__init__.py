# SPDX-License-Identifier: Apache-2.0
"""How fast this machine and a device score and read, and how work is shared between them."""
