# SPDX-License-Identifier: Apache-2.0
"""What selection costs in quality: sparse decode against the full cache, on real text."""
