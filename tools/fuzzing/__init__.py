# SPDX-License-Identifier: Apache-2.0
"""A fuzzer for everything that HillInfer reads."""
