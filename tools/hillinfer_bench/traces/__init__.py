# SPDX-License-Identifier: Apache-2.0
"""Public traces of requests, and how policies of eviction and admission do on them."""
