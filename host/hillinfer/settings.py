# SPDX-License-Identifier: Apache-2.0
"""Everything a user can choose about a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer.values import ByteSize, byte_size, choice, path, real_number, text, whole_number
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.step_need import ExactShare

# --- Choices ---


class PoolSizes(StrEnum):
    """Whether all hot pools have the same size, or those with more misses a larger one."""

    EQUAL = "equal"
    MISSES = "misses"


class IOChoice(StrEnum):
    """How rows and shadows are read; it changes speed alone."""

    AUTO = "auto"
    URING = "uring"
    THREADS = "threads"


class Encryption(StrEnum):
    """Whether files of the cold pool are sealed; it changes speed alone.

    `auto` seals them beside an encrypted store, whose rows they hold.
    """

    AUTO = "auto"
    YES = "yes"
    NO = "no"


class QuerySource(StrEnum):
    """The query that tokens are scored with; it changes which tokens are selected.

    `true` is the layer's own, known when its attention begins; `predicted` is made from the input
    of the layer before it, so that scoring and reading overlap with that layer's computation
    (HillInfer section 4.3). `auto` takes what a table says for the model's family.
    """

    AUTO = "auto"
    TRUE = "true"
    PREDICTED = "predicted"


class QuestionReading(StrEnum):
    """How the tokens after the document are read."""

    CHUNKS = "chunks"
    SINGLY = "singly"
    ONE_SET = "one-set"
    AUTO = "auto"


class ModelName(StrEnum):
    """What `--beta auto` minimises; it changes speed alone."""

    SCORES_THEN_ROWS = "scores_then_rows"
    PARALLEL = "parallel"
    TWO_LINKS = "two_links"


# Devices that hold no shadow of their own: all of it lies in DRAM or on the drive.
HOST_DEVICES = frozenset({"nvme", "golden"})
# Those that score codes alone: nothing of them casts FP16 keys, or each launch would bring all rows
# to a card again, four times the bytes of codes.
_CODE_DEVICES = frozenset({"nvme", "core", "pynq"})


@dataclass(frozen=True)
class DeviceOptions:
    """How a device is opened and what it is given.

    Parameters
    ----------
    beta
        Host-scored to device-scored segments, Mc/Ms (HillInfer equation 4); 0 gives the device
        every full group. None for what the rates of host and device say.
    xclbin
        Image of the kernels; devices `xrt` and `pynq` need one.
    pynq_python
        Interpreter of PYNQ's environment; None for the one that `pynq_python` finds.
    """

    beta: float | None = None
    xclbin: Path | None = None
    pynq_python: Path | None = None


# --- Settings ---

AUTO = "auto"
# α with and without coded tokens, and the share of exact ones (docs/results/precision.md).
CODED_ALPHA, EXACT_ALPHA = 0.2, 0.1
EXACT_SHARE = 0.02
# Far more than helps; what is allocated by a count must not be decided by a slip of the keyboard.
_MOST_OF_A_COUNT = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How tokens are selected, where rows lie and how much memory that may take.

    Only `alpha`, `rule`, `scope`, `query`, `shadow`, `kept_sinks`, `kept_recent` and `max_selected`
    may change which tokens are selected. `exact` and `exact_floor` say how precise those are.
    `block_rows` changes output bits by its order of summing; everything else changes speed and
    memory alone.

    Raises SettingsError where a value is outside its range; the message names it.

    Parameters
    ----------
    alpha
        Importance rate α: the share of the current length that is selected, above 0, at most 1.
        None (text: `auto`) for what `importance_rate` says.
    rule, scope
        How a token is scored and what shares one selected set.
    query
        Tokens are scored with the layer's true query, or with one predicted a layer earlier, so
        that scoring and reading overlap with computing; by default what the table of
        `hf/hooks` says for the model's family. Layers 0 and 1 take their true query always.
    shadow
        Number format of the key shadow; None (text: `auto`) for INT4, or INT2 where INT4 does not
        leave half the budget for rows. `KeyMode.FP16` keeps rows on a device, `csim` or `xrt`,
        whose kernel casts their keys to INT8 codes while it scores; the host codes the rest alike.
    kept_sinks, kept_recent
        Tokens that are always selected: the first and the most recent ones.
    max_selected
        Upper bound of the selected tokens; None for no bound.
    exact
        Share of the current length, 0 to 1, that comes as 16-bit rows: the best of the selected
        tokens. The others come as codes of 4 bits. With 1 all come as rows. None (text: `auto`) for
        what `exact_share` says.
    exact_floor
        Tokens that come as rows at least, as far as so many are selected.
    dram_budget
        M0, the bound on host memory for hot rows, shadow, statistics, scores and staging; bytes,
        text like `64MiB`, or a share of the KV cache like `25%`.
    pool_policy
        Name in the table of pool policies: which rows are hot.
    pool_sizes
        Hot pools of one size, or by each layer's measured misses.
    pool_timeline
        File that what happens to the pools is written to, a line per layer and step; None for
        none. Each engine begins it anew.
    trace
        File that what every lane does is written to, for trace viewers; None for none. Each engine
        begins it anew.
    cold_dir
        Directory on the drive that holds the cold pool; None for the user's cache directory.
    encrypt_cold_pool
        Whether the files of the cold pool are encrypted, under a key that is in memory alone; by
        default beside an encrypted store.
    device
        Name in the table of devices: `nvme`, `golden`, `core`, `csim` or `xrt`; `pynq`
        with the package hillinfer-pynq.
    beta
        Host-scored to device-scored segments, Mc/Ms; 0 gives the device every full group. None
        (text: `auto`) for what `beta_model` says with this machine's rates; the rates of an
        emulated device say nothing, and it is given every full group.
    beta_model
        Whose latency is made least where `beta` is None.
    xclbin
        Image of the kernels; devices `xrt` and `pynq` need one.
    pynq_python
        Interpreter of PYNQ's environment, for device `pynq`; None for the one that the variable
        HILLINFER_PYNQ_PYTHON names, or else that of `make pynq-env`.
    block_rows
        Rows that are read and attended to at a time; never derived from the budget, because it
        changes output bits.
    prefetch_blocks
        Blocks of rows that may be read before the layer that wants them begins.
    block_tokens
        Tuples of one score block.
    io
        How the drive is read: io_uring, threads, or automatically io_uring where it is allowed.
    io_threads
        Reads in flight without io_uring.
    """

    alpha: float | None = None
    rule: Rule = Rule.WEIGHT_SUM
    scope: Scope = Scope.LAYER
    query: QuerySource = QuerySource.AUTO
    shadow: KeyMode | None = KeyMode.INT4
    kept_sinks: int = 4
    kept_recent: int = 32
    max_selected: int | None = None
    exact: float | None = None
    exact_floor: int = 128
    dram_budget: ByteSize = field(default_factory=lambda: ByteSize(share=0.25))
    pool_policy: str = "decayed"
    pool_sizes: PoolSizes = PoolSizes.EQUAL
    pool_timeline: Path | None = None
    trace: Path | None = None
    cold_dir: Path | None = None
    encrypt_cold_pool: Encryption = Encryption.AUTO
    device: str = "nvme"
    beta: float | None = None
    beta_model: ModelName = ModelName.SCORES_THEN_ROWS
    xclbin: Path | None = None
    pynq_python: Path | None = None
    block_rows: int = 512
    prefetch_blocks: int = 4
    block_tokens: int = 1024
    io: IOChoice = IOChoice.AUTO
    io_threads: int = 64

    def __post_init__(self) -> None:
        """Refuse values that mean nothing, and bring the others to their types."""
        for one in fields(self):
            # The only way to set a field of a frozen instance.
            object.__setattr__(self, one.name, _typed(one.name, getattr(self, one.name)))
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise SettingsError(f"alpha={self.alpha} must be above 0 and at most 1")
        if self.shadow is KeyMode.FP16 and self.device in _CODE_DEVICES:
            raise SettingsError(
                f"shadow=fp16 needs a device whose kernel casts FP16 keys: choose --device csim or "
                f"xrt, or with device={self.device} --shadow int8, which selects the same tokens"
            )
        if self.kept_sinks < 0 or self.kept_recent < 1:
            raise SettingsError(
                f"kept_sinks={self.kept_sinks}, kept_recent={self.kept_recent}: "
                "the sinks must not be negative and at least the newest token is kept"
            )
        if self.beta is not None and not (math.isfinite(self.beta) and self.beta >= 0):
            raise SettingsError(
                f"beta={self.beta} must be 0 or more, Mc/Ms in whole segments, or auto"
            )
        if self.max_selected is not None and self.max_selected < 1:
            raise SettingsError(f"max_selected={self.max_selected} must be at least 1")
        if self.exact is not None and not 0 <= self.exact <= 1:
            raise SettingsError(f"exact={self.exact} must be a share from 0 to 1; 1 codes nothing")
        if self.exact_floor < 0:
            raise SettingsError(f"exact_floor={self.exact_floor} must be 0 or more tokens")
        if self.prefetch_blocks < 0:
            raise SettingsError(f"prefetch_blocks={self.prefetch_blocks} must be 0 or more")
        for name in ("block_rows", "block_tokens", "io_threads"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("block_rows", "block_tokens", "io_threads", "prefetch_blocks"):
            if getattr(self, name) > _MOST_OF_A_COUNT:
                raise SettingsError(
                    f"{name}={getattr(self, name)} must be at most {_MOST_OF_A_COUNT}"
                )

    @property
    def key_mode(self) -> KeyMode:
        """The shadow's format.

        Raises SettingsError where it is still to be chosen.
        """
        if self.shadow is None:
            raise SettingsError(
                "shadow=auto needs the length of the context: call new_cache(expected_tokens=...), "
                "or name a format: int8, int4 or int2"
            )
        return self.shadow

    @property
    def has_coded_tokens(self) -> bool:
        """Whether selected tokens may come as codes (contract, section 15).

        Keys of 2 bits are not attended to, and of FP16 keys on a device there are no codes, so all
        tokens are exact then. So they are where as large a share is exact as α selects.
        """
        is_exact = self.exact_share == 1 or (
            self.alpha is not None
            and self.exact_share >= self.alpha
            and self.exact_floor > self.kept_tokens
        )
        return not is_exact and self.shadow not in (KeyMode.INT2, KeyMode.FP16)

    @property
    def exact_share(self) -> float:
        """The share of tokens that come as rows: as chosen, else 0.02.

        With an α that was chosen it is 1 by default: that α means what it always meant. So it is
        with a card, which would give its shadows back for what coded tokens weigh.
        """
        if self.exact is not None:
            return self.exact
        is_coded = self.alpha is None and self.device in HOST_DEVICES
        return EXACT_SHARE if is_coded else 1.0

    @property
    def importance_rate(self) -> float:
        """α: as chosen, else 0.2 where tokens may come as codes, and 0.1 where all are exact."""
        if self.alpha is not None:
            return self.alpha
        return CODED_ALPHA if self.has_coded_tokens else EXACT_ALPHA

    def computed_on(self, device: str) -> Settings:
        """Return the settings of a model that computes on a torch device, like `cpu` or `cuda`.

        On a GPU steps with coded tokens take two to three times as long (docs/results/gpu.md), so
        there all tokens are exact by default.
        """
        return self if device == "cpu" or self.exact is not None else replace(self, exact=1.0)

    @property
    def device_options(self) -> DeviceOptions:
        """What the device is opened with."""
        return DeviceOptions(self.beta, self.xclbin, self.pynq_python)

    @property
    def kept_tokens(self) -> int:
        """Number of tokens that are always selected."""
        return self.kept_sinks + self.kept_recent

    @property
    def step_share(self) -> ExactShare:
        """How many tokens a decode step selects, and how many of these are exact."""
        return ExactShare(
            self.importance_rate, self.exact_share, self.exact_floor, self.kept_tokens
        )

    def changed(self, **changes: Any) -> Settings:
        """Return these settings with some of them changed, given as values or as text.

        Raises SettingsError where a name or a value is unknown, out of range or of another type.
        """
        known = {one.name for one in fields(self)}
        for name, value in changes.items():
            if name not in known:
                near = get_close_matches(name, known, 1)
                meant = f"did you mean {near[0]}? There are" if near else "choose one of"
                raise SettingsError(f"{name!r} is no setting: {meant} {', '.join(sorted(known))}")
            if name in _AUTOMATIC and isinstance(value, str) and value == AUTO:
                changes[name] = None
            elif name in _NUMBERS and isinstance(value, str):
                changes[name] = _number(name, value)
        return replace(self, **changes)


def _typed(name: str, value: Any) -> Any:
    """Return a setting's value in its type.

    Raises SettingsError where it has none that means the same.
    """
    if value is None and name in _OPTIONAL:
        return None
    if name in _CHOICES:
        return choice(name, _CHOICES[name], value)
    typed = _TYPES.get(name)
    return whole_number(name, value) if typed is None else typed(name, value)


def _number(name: str, value: str) -> float:
    try:
        return float(value) if name in ("alpha", "beta", "exact") else int(value)
    except ValueError as error:
        what = f"neither a number nor {AUTO}" if name in _AUTOMATIC else "no number"
        raise SettingsError(f"{name}={value!r} is {what}") from error


_CHOICES: dict[str, type[StrEnum]] = {
    "rule": Rule,
    "scope": Scope,
    "query": QuerySource,
    "shadow": KeyMode,
    "pool_sizes": PoolSizes,
    "beta_model": ModelName,
    "io": IOChoice,
    "encrypt_cold_pool": Encryption,
}
# All others are counts.
_TYPES: dict[str, Callable[[str, Any], Any]] = {
    "alpha": real_number,
    "beta": real_number,
    "exact": real_number,
    "dram_budget": byte_size,
    "pool_policy": text,
    "device": text,
    "pool_timeline": path,
    "trace": path,
    "cold_dir": path,
    "xclbin": path,
    "pynq_python": path,
}
_AUTOMATIC = frozenset({"alpha", "exact", "shadow", "beta"})
_OPTIONAL = frozenset(
    {
        "alpha",
        "exact",
        "shadow",
        "max_selected",
        "pool_timeline",
        "trace",
        "cold_dir",
        "beta",
        "xclbin",
        "pynq_python",
    }
)
_NUMBERS = frozenset(
    {one.name for one in fields(Settings)} - set(_CHOICES) - set(_TYPES)
    | {"alpha", "beta", "exact"}
)
