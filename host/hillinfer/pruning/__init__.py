# SPDX-License-Identifier: Apache-2.0
"""Reading a prompt in stages, deeper layers with fewer of its tokens (SlimInfer)."""
