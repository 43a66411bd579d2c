# SPDX-License-Identifier: Apache-2.0
"""Systems compared at equal quality: what each pays in bytes and time for the same KL."""
