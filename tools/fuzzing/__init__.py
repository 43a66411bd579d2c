# SPDX-License-Identifier: Apache-2.0
"""Odd inputs for everything that HillInfer reads, and what must become of them."""
