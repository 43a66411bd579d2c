# SPDX-License-Identifier: Apache-2.0
"""Documents asked for again and again in little memory: forms and policies beside rivals."""
