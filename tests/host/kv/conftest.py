# SPDX-License-Identifier: Apache-2.0
"""All ways of reading a drive."""

from drive_fixtures import content, engine_choice

__all__ = ["content", "engine_choice"]
