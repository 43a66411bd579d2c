# SPDX-License-Identifier: Apache-2.0
"""Hatchling's build hook: the native library goes into the wheel where it can be compiled."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDER = Path(__file__).parent / "tools" / "build_native.py"


class NativeLibraryHook(BuildHookInterface[Any]):
    """Compiles the library; without a compiler the package installs and says so when used."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build before files are collected, and say for which platform the wheel then is.

        One that is there already, and newer than its sources, is taken as it is.
        """
        spec = importlib.util.spec_from_file_location("build_native", _BUILDER)
        assert spec is not None
        assert spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        is_current = builder.is_current()
        if version == "editable" and is_current:
            return
        try:
            library = builder.LIBRARY if is_current else builder.build()
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
