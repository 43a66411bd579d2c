# SPDX-License-Identifier: Apache-2.0
"""Hatchling's build hook: the native library goes into the wheel where it can be compiled."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDER = Path(__file__).parent / "tools" / "build_native.py"


class NativeLibraryHook(BuildHookInterface[Any]):
    """Compiles the library; without a compiler the package installs and says so when used."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before files are collected, and say for which platform the wheel then is.

        A wheel is built anew, because nothing says of a library that lies here for which processor
        and which glibc it was made. `HILLINFER_NATIVE=current` takes one that is newer than its
        sources all the same, as an editable install does. With `HILLINFER_NATIVE=beside` an
        editable install leaves the library to who builds it meanwhile, as the Makefile does.
        """
        spec = importlib.util.spec_from_file_location("build_native", _BUILDER)
        assert spec is not None
        assert spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        is_current = builder.is_current()
        wanted = os.environ.get("HILLINFER_NATIVE")
        if version == "editable" and (is_current or wanted == "beside"):
            return
        try:
            library = builder.LIBRARY if is_current and wanted == "current" else builder.build()
        except (builder.BuildError, OSError) as error:
            self.app.display_warning(
                f"native library: not built, and nothing generates without it: {error}"
            )
            return
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        # ctypes loads it, so any Python 3 will do.
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"
