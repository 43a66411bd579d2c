# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a prompt decoded tokens attend to: one class for each policy."""
