# SPDX-License-Identifier: Apache-2.0
"""Puts drives that fail on purpose on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))
