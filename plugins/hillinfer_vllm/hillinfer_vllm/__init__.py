# SPDX-License-Identifier: Apache-2.0
"""The store of HillInfer beneath vLLM, as a KV connector (`docs/vllm.md`)."""
