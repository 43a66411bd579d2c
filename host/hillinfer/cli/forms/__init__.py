# SPDX-License-Identifier: Apache-2.0
"""Stored documents: they come and go (`store put`), and have forms (`hillinfer documents`)."""
