# SPDX-License-Identifier: Apache-2.0
"""All ways of reading a drive."""

import sys
from pathlib import Path

from drive_fixtures import content, engine_choice, threads_of_python

# Drives that fail on purpose.
sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

__all__ = ["content", "engine_choice", "threads_of_python"]
