# SPDX-License-Identifier: Apache-2.0
"""Puts the harness, which `make faults` uses too, on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
