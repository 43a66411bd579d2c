# SPDX-License-Identifier: Apache-2.0
"""The device `xrt`: a card, or its emulation, behind AMD's Xilinx Runtime."""
