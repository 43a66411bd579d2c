# SPDX-License-Identifier: Apache-2.0
"""The device `pynq`: kernels behind PYNQ's Overlay, in an environment of its own."""
