# SPDX-License-Identifier: Apache-2.0
"""Read documents kept in a directory, and answered from again in another process."""
