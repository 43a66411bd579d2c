# SPDX-License-Identifier: Apache-2.0
"""The scoring contract in torch: what tests compare the executions with."""
