# SPDX-License-Identifier: Apache-2.0
"""HillInfer: long-context LLM inference with the KV cache on a drive."""
