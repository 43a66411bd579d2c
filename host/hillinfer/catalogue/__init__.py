# SPDX-License-Identifier: Apache-2.0
"""A catalogue of stored documents: quality of their forms, how often they are asked for, plans."""
