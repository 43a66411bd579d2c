# SPDX-License-Identifier: Apache-2.0
"""Other ways to compute a model's linear layers, attached apart from HillInfer."""
