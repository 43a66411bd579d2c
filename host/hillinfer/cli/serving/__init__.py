# SPDX-License-Identifier: Apache-2.0
"""Commands that keep a model loaded."""
