# SPDX-License-Identifier: Apache-2.0
"""The server's side of HTTP; nothing else of the package imports FastAPI."""
