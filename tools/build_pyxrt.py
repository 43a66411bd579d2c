# SPDX-License-Identifier: Apache-2.0
"""Put a module pyxrt into this environment where XRT has headers and no module that it can import.

Ends with 0 also where there is no XRT: only `--device xrt` needs one, and the line says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hillinfer_hw.toolchain import MissingToolError
from hillinfer_hw.xrt_binding import build_binding
from hillinfer_hw.xrt_installation import XRT_VARIABLE, debian_xrt, sourced_xrt


def main() -> int:
    """Say where pyxrt is, or build it."""
    asked = subprocess.run(
        # Not from where this is called: XRT's setup.sh may leave an empty part in PYTHONPATH, too.
        [sys.executable, "-P", "-c", "import pyxrt; print(pyxrt.__file__)"],
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode == 0:
        print(f"pyxrt: {asked.stdout.strip()}")
    else:
        print(f"pyxrt: {install(os.environ, Path(sysconfig.get_path('platlib')))}")
    return 0


def install(environment: Mapping[str, str], folder: Path) -> str:
    """Build the module and copy it; return a line that says what came of it.

    Parameters
    ----------
    environment
        Says where an XRT is that does not come with the system.
    folder
        Where modules are found.
    """
    try:
        xrt = sourced_xrt(environment) if XRT_VARIABLE in environment else debian_xrt()
        built = build_binding(xrt)
    except MissingToolError as missing:
        return f"not built, so no --device xrt: {missing}"
    (module,) = built.glob("pyxrt*")
    # By another name first: a process may have the old one open.
    copy = folder / f".{module.name}"
    shutil.copy2(module, copy)
    copy.replace(folder / module.name)
    return f"built for XRT {xrt.version}: {folder / module.name}"


if __name__ == "__main__":
    sys.exit(main())
