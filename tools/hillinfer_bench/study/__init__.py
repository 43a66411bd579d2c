# SPDX-License-Identifier: Apache-2.0
"""The paper's tables and figures: accuracy measured here, latency modelled for its machine."""
