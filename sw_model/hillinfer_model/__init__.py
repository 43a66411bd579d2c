# SPDX-License-Identifier: Apache-2.0
"""The scoring contract: kernel spec, layouts and the bit-exact golden model, in numpy alone."""
