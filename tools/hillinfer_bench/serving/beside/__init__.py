# SPDX-License-Identifier: Apache-2.0
"""Other servers with the same model, prompts and client, and what they are asked beside ours."""
