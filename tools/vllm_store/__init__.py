# SPDX-License-Identifier: Apache-2.0
"""vLLM over the store: what `make vllm-store` runs, in parts."""
