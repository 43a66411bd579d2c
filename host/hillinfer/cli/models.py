# SPDX-License-Identifier: Apache-2.0
"""`hillinfer models`: the registry models by name."""

from __future__ import annotations

from hillinfer.models.registry_model import REGISTRY_MODELS


def models() -> None:
    """List the registry models, their licences and whether they are on this machine."""
    for model in REGISTRY_MODELS.values():
        place = model.folder if model.present else f"missing: hillinfer fetch {model.name}"
        print(f"{model.name}: {model.description}; {model.license}; {place}")
