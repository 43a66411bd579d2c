# SPDX-License-Identifier: Apache-2.0
"""The next layer's query, by family of models."""
