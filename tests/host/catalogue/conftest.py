# SPDX-License-Identifier: Apache-2.0
"""Documents in stores, as tests of forms have them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "forms"))
