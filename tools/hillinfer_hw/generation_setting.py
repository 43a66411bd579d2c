# SPDX-License-Identifier: Apache-2.0
"""The model, scoring and lengths that `make hw_emu` generates with."""

from __future__ import annotations

from dataclasses import dataclass

from hillinfer_model.choices import KeyMode, Rule
from hillinfer_model.kernel_spec import KernelSpec
from hillinfer_model.presets import preset_spec


@dataclass(frozen=True)
class GenerationSetting:
    """A model, how its tokens are scored, and how much is generated.

    Parameters
    ----------
    preset
        The model's, whose shape the kernels have.
    mode, rule
        Of shadows and scores.
    new_tokens
        To generate.
    characters
        Of the document.
    """

    preset: str
    mode: KeyMode
    rule: Rule
    new_tokens: int
    characters: int

    @property
    def spec(self) -> KernelSpec:
        """What the kernels are made from."""
        return preset_spec(self.preset, self.mode, self.rule)

    @property
    def stem(self) -> str:
        """What the spec is called in names of files."""
        return f"{self.preset}-{self.mode}-{self.rule}"
