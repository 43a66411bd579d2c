# SPDX-License-Identifier: Apache-2.0
"""What measures HillInfer and is no part of it."""
