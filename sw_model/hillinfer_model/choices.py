# SPDX-License-Identifier: Apache-2.0
"""Enumerations of the rule, the scope and the key mode, which say how a token is scored."""

from __future__ import annotations

from enum import StrEnum


class Rule(StrEnum):
    """How a layer's queries and keys become one score (scoring contract, section 7)."""

    WEIGHT_SUM = "weight_sum"
    RAW_SUM = "raw_sum"


class Scope(StrEnum):
    """What shares one selected set: the whole layer, or each KV head."""

    LAYER = "layer"
    KV_HEAD = "kv_head"


class KeyMode(StrEnum):
    """Where the kernel takes key codes from: FP16 keys cast on the fly, or a key shadow."""

    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def code_bits(self) -> int:
        """Bits of one key code; FP16 keys are cast to INT8 codes."""
        return {"fp16": 8, "int8": 8, "int4": 4, "int2": 2}[self.value]

    @property
    def codes(self) -> KeyMode:
        """The format of the codes that keys become: that of `fp16` is INT8."""
        return KeyMode.INT8 if self is KeyMode.FP16 else self
