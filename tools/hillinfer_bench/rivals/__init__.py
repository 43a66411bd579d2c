# SPDX-License-Identifier: Apache-2.0
"""Other systems' ways of decoding with a KV cache, in this runtime, to compare with."""
