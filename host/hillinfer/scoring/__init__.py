# SPDX-License-Identifier: Apache-2.0
"""The scoring contract on the host: from a query and key shadows to selected tokens."""
