# SPDX-License-Identifier: Apache-2.0
"""The scoring contract in C++ for the host: finding, loading and calling the library."""
