# SPDX-License-Identifier: Apache-2.0
"""What the DRAM budget must hold for a context, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hillinfer.drive.checksums import ROW_SUM_BYTES
from hillinfer.drive.files import PAGE_BYTES, round_up
from hillinfer.drive.read_turns import QUANTUM_BYTES
from hillinfer.errors import BudgetError
from hillinfer.kv.hot_pool import SLOT_BYTES
from hillinfer.kv.pool_policies import make_pool_policy
from hillinfer.kv.sequence import observed_bytes
from hillinfer.memory_budget import TABLE_GROWTH_ROWS
from hillinfer.model_shape import ModelShape
from hillinfer.native.split import split_bytes, with_more
from hillinfer.native.tables import HIT_BYTES, room_for
from hillinfer.scoring.layout import probe_bytes, score_bytes_per_token, scratch_bytes
from hillinfer.secrecy.cold_pages import table_bytes
from hillinfer.settings import HOST_DEVICES, Encryption, Settings
from hillinfer.shadow.code_file import table_bytes as code_table_bytes
from hillinfer.shadow.coming_codes import buffer_bytes as code_buffer_bytes
from hillinfer.shadow.store import (
    LEAVING_SHADOWS,
    STREAM_BUFFERS,
    held_bytes,
    sealed_bytes,
    shadow_bytes,
    statistics_bytes,
)
from hillinfer.shadow.values import ROW_TABLE_BYTES
from hillinfer.values import format_apart, format_bytes
from hillinfer_model.choices import KeyMode, Rule, Scope
from hillinfer_model.kernel_spec import GROUP_TOKENS, KernelSpec
from hillinfer_model.selection import exact_count, selected_count
from hillinfer_model.value_layout import code_row_bytes

# --- What DRAM holds because a device scores ---

# The newest 256 tokens lie in two segments at most.
_NEWEST_SHADOWS = 2


@dataclass(frozen=True)
class DevicePart:
    """Bytes beyond those that the host needs to score by itself.

    Parameters
    ----------
    probe_bytes
        The probe tokens of all segments, wherever their shadows lie.
    staging_bytes
        The buffer that shadows are brought back into, and copies of those of the newest tokens.
    """

    probe_bytes: int = 0
    staging_bytes: int = 0

    @classmethod
    def of(
        cls, device: str, spec: KernelSpec, layers: int, tokens: int, sequences: int
    ) -> DevicePart:
        """Return the part of a device of the host's table for `sequences` of `tokens` each.

        How much room a card has is not known before it is opened: its room lowers nothing here.
        """
        if device in HOST_DEVICES:
            return cls()
        segments = -(-tokens // spec.segment_tokens)
        return cls(
            probe_bytes=layers
            * sequences
            * sum(probe_bytes(spec, number) for number in range(segments)),
            staging_bytes=(1 + _NEWEST_SHADOWS) * shadow_bytes(spec),
        )


# --- the plan ---

WRITE_BACK_BUFFERS = 2
GATHER_BUFFERS = 2
_WIDENED_ITEM_BYTES = 4
_KEY_ITEM_BYTES = 2
_SLOT_TABLE_BYTES = 4
SCORE_GROWTH_TOKENS = 1024


def kernel_spec(shape: ModelShape, settings: Settings) -> KernelSpec:
    """Return the kernel spec of a model's shape under some settings.

    Raises
    ------
    SettingsError
        Where the shadow's format is still to be chosen.
    """
    return KernelSpec(
        head_dim=shape.head_dim,
        kv_heads=shape.kv_heads,
        group_size=shape.group_size,
        key_mode=settings.key_mode,
        rule=settings.rule,
        block_tokens=settings.block_tokens,
    )


def _narrower_than(mode: KeyMode) -> tuple[str, ...]:
    by_width = [KeyMode.INT8, KeyMode.INT4, KeyMode.INT2]
    return tuple(one.value for one in by_width[by_width.index(mode.codes) + 1 :])


@dataclass(frozen=True)
class BudgetPlan:
    """The parts of M0 for one context length (design, section 2), all in bytes.

    Parameters
    ----------
    budget_bytes
        M0.
    kv_bytes
        Rows of the whole context, for comparison.
    shadow_bytes
        Key shadow in DRAM, with the copies of its probe tokens.
    streamed_shadow_bytes
        Key shadow on the drive, read for every new token.
    kept_bytes
        The least hot rows that make sense: the kept tokens, as far as the context has so many, and
        the open group of every layer.
    all_rows_bytes
        Hot rows if none were cold.
    staging_bytes
        Every I/O, gather, write-back and prefill buffer, and scoring scratch.
    other_bytes
        Statistics, slot tables, checksums of rows, hit-rate tables, observed queries, scores.
    device
        Of these, what is there because a device scores; the probe tokens are no part of
        `shadow_bytes`.
    narrower_shadows
        Formats of the key shadow that take less than this one.
    encryption
        Whether the cold pool is sealed, whose tags and buffers are among the others.
    """

    budget_bytes: int
    kv_bytes: int
    shadow_bytes: int
    streamed_shadow_bytes: int
    kept_bytes: int
    all_rows_bytes: int
    staging_bytes: int
    other_bytes: int
    device: DevicePart
    narrower_shadows: tuple[str, ...] = ()
    encryption: Encryption = Encryption.NO

    @classmethod
    def for_context(
        cls, shape: ModelShape, settings: Settings, tokens: int, sequences: int = 1
    ) -> BudgetPlan:
        """Plan for `tokens` positions in each of `sequences` sequences of their own rows.

        The whole shadow stays in DRAM where the budget allows. Where it does not, half the budget
        is left for rows and the rest of the shadow is streamed.
        """
        whole = cls.with_whole_shadow(shape, settings, tokens, sequences)
        if whole.budget_bytes >= whole.required_bytes:
            return whole
        streamed = whole.streamed(kernel_spec(shape, settings), shape.layers, sequences)
        # The buffers of streaming may be more than a small shadow.
        return streamed if streamed.required_bytes < whole.required_bytes else whole

    @classmethod
    def with_whole_shadow(
        cls, shape: ModelShape, settings: Settings, tokens: int, sequences: int = 1
    ) -> BudgetPlan:
        """Plan with the whole shadow in DRAM, whatever the budget."""
        spec = kernel_spec(shape, settings)
        segments = -(-tokens // spec.segment_tokens) * sequences
        kv_bytes = tokens * sequences * shape.token_bytes
        rows = round_up(round_up(tokens, GROUP_TOKENS) * sequences, TABLE_GROWTH_ROWS)
        row = shape.layers * (shape.row_bytes + SLOT_BYTES)
        tails = GROUP_TOKENS * shape.token_bytes * sequences
        observed = make_pool_policy(settings.pool_policy).observed_queries
        device = DevicePart.of(settings.device, spec, shape.layers, tokens, sequences)
        return cls(
            budget_bytes=settings.dram_budget.resolve(kv_bytes),
            kv_bytes=kv_bytes,
            shadow_bytes=segments * shape.layers * held_bytes(spec),
            streamed_shadow_bytes=0,
            narrower_shadows=_narrower_than(spec.key_mode),
            kept_bytes=min(settings.kept_tokens, tokens) * row * sequences + tails,
            all_rows_bytes=tokens * row * sequences + tails,
            staging_bytes=staging_bytes(shape, settings) + device.staging_bytes,
            other_bytes=segments * shape.layers * statistics_bytes(spec)
            # One slot table is there twice while it grows.
            + (rows * shape.layers + rows - TABLE_GROWTH_ROWS) * _SLOT_TABLE_BYTES
            + rows * shape.layers * ROW_SUM_BYTES
            + _tag_bytes(shape, settings, rows)
            + (hit_bytes(shape, tokens) + observed_bytes(shape, observed)) * sequences
            + score_bytes(spec, settings.scope, tokens)
            + segments * shape.layers * value_statistics_bytes(spec, settings)
            + coded_bytes(shape, spec, settings, tokens, sequences)
            + _code_table_bytes(shape, settings, rows),
            device=device,
            encryption=settings.encrypt_cold_pool,
        )

    def streamed(self, spec: KernelSpec, layers: int, sequences: int) -> BudgetPlan:
        """Return the plan with so much of the shadow on the drive that half is left for rows."""
        one, held = shadow_bytes(spec), held_bytes(spec)
        staging, other = self.staging_bytes + STREAM_BUFFERS * one, self.other_bytes
        shadows = self.shadow_bytes // held
        if self.encryption is Encryption.YES:
            buffer, tags = sealed_bytes(spec, shadows)
            staging, other = staging + buffer, other + tags
        rows = max(self.kept_bytes, self.budget_bytes // 2)
        fixed = rows + staging + other + self.device.probe_bytes
        room = (self.budget_bytes - fixed) // held
        resident = min(max(room, _moving_shadows(layers, sequences)), shadows)
        return replace(
            self,
            shadow_bytes=resident * held,
            streamed_shadow_bytes=(shadows - resident) * one,
            staging_bytes=staging,
            other_bytes=other,
        )

    def shadow_limit(self, spec: KernelSpec, layers: int, sequences: int) -> int:
        """Return the most bytes of full shadows in DRAM that this plan has room for.

        The copies of their probe tokens come on top.
        """
        shadows = self.shadow_bytes // held_bytes(spec)
        if self.streamed_shadow_bytes:
            shadows = max(0, shadows - _moving_shadows(layers, sequences))
        return shadows * shadow_bytes(spec)

    @property
    def required_bytes(self) -> int:
        """The smallest budget this plan can run with."""
        return self._fixed_bytes + self.kept_bytes

    @property
    def comfortable_bytes(self) -> int:
        """The smallest budget of which half, or room for all rows, is left for hot rows.

        At least what is required: the kept rows may be more than half.
        """
        rows = min(self._fixed_bytes, self.all_rows_bytes)
        return self._fixed_bytes + max(self.kept_bytes, rows)

    @property
    def hot_bytes(self) -> int:
        """Bytes left for hot rows, the kept ones included."""
        return self.budget_bytes - self.required_bytes + self.kept_bytes

    @property
    def leaves_half_for_rows(self) -> bool:
        """Whether half the budget, or room for all rows there are, is left for hot rows."""
        return self.hot_bytes >= min(self.budget_bytes / 2, self.all_rows_bytes)

    def check(self) -> None:
        """Raise BudgetError where the budget is too small, naming the parts and the least."""
        if self.budget_bytes < self.required_bytes:
            budget, needs = format_apart(self.budget_bytes, self.required_bytes)
            if self.streamed_shadow_bytes:
                needs += " even with the key shadow on the drive"
            raise BudgetError(
                f"the DRAM budget of {budget} is too small: this context "
                f"needs {needs} (shadow "
                f"{format_bytes(self.shadow_bytes + self.device.probe_bytes)}, kept rows "
                f"{format_bytes(self.kept_bytes)}, staging {format_bytes(self.staging_bytes)}, "
                f"other {format_bytes(self.other_bytes)}); raise --dram-budget{self._narrower}, or "
                "lower --block-rows, which sets most of the staging"
            )

    @property
    def _narrower(self) -> str:
        """Return the advice to take a smaller shadow, where there is one."""
        if not self.narrower_shadows:
            return ""
        return f", shrink the shadow with --shadow {' or '.join(self.narrower_shadows)}"

    @property
    def _fixed_bytes(self) -> int:
        """What is there whatever the rows take."""
        shadow = self.shadow_bytes + self.device.probe_bytes
        return shadow + self.staging_bytes + self.other_bytes


def open_ended_shadow_limit(shape: ModelShape, settings: Settings, budget_bytes: int) -> int:
    """Return the most bytes of full shadows in DRAM where nobody knows how long contexts get.

    Half of the budget is left for rows then, however long they get.
    """
    return max(0, budget_bytes // 2 - staging_bytes(shape, settings))


def _moving_shadows(layers: int, sequences: int) -> int:
    """Return how many shadows DRAM must hold that are no full ones at rest.

    For each sequence and layer, the open segment and a full one: it is open again while the
    sequence is cut, or a device holds it, too, and its tokens are among the newest. Then those on
    their way to the drive.
    """
    return 2 * layers * sequences + LEAVING_SHADOWS


def score_bytes(spec: KernelSpec, scope: Scope, tokens: int) -> int:
    """Return the bytes of the scores of one call over `tokens`, in steps of 1,024 tokens."""
    return round_up(tokens, SCORE_GROWTH_TOKENS) * score_bytes_per_token(spec, scope)


def hit_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of one sequence's hit-rate table, one layer of it twice while it grows."""
    return (shape.layers + 1) * HIT_BYTES * room_for(tokens)


def value_statistics_bytes(spec: KernelSpec, settings: Settings) -> int:
    """Return what statistics of a segment's values take in one layer; 0 where nothing is coded."""
    return statistics_bytes(spec) if settings.has_coded_tokens else 0


# What a layer chose that attends, what the next one did, and what a layer chooses in its turn.
_LISTS = 3
# Of each other row of a batch, what it chose of both layers.
_MORE_LISTS = 2
# Positions, rows and places of a coded token, beside a GPU.
_PLACE_BYTES = 14 * 8
_WEIGHT_BYTES = 4


def weight_bytes(spec: KernelSpec) -> int:
    """Return what weighs a coded token in each set: L', and if it is invalid."""
    return spec.kv_heads * spec.group_size * _WEIGHT_BYTES + spec.kv_heads


def weighed_bytes(spec: KernelSpec) -> int:
    """Return what a step beside a GPU keeps of each set's coded token: its weights and places."""
    return weight_bytes(spec) + _PLACE_BYTES


_PRODUCT_BYTES = 4
# Of what a step keeps to read no key twice: more leaves the caches.
MOST_KEPT_PRODUCT_BYTES = 16 << 20


def kept_product_bytes(spec: KernelSpec, tokens: int) -> int:
    """Return what a step keeps of a true query's products until they weigh what is coded.

    0 where they are many, or those of summed queries rank, which weigh nothing.
    """
    own = round_up(tokens, GROUP_TOKENS) * spec.query_heads * _PRODUCT_BYTES
    return own if spec.rule is Rule.WEIGHT_SUM and own <= MOST_KEPT_PRODUCT_BYTES else 0


_CODED_GROWTH_TOKENS = 256


def most_coded(sets: int, selected: int, tokens: int) -> int:
    """Return for how many tokens a step has room whose codes are read of a file."""
    return round_up(min(tokens, sets * selected), _CODED_GROWTH_TOKENS)


def _code_table_bytes(shape: ModelShape, settings: Settings, rows: int) -> int:
    """Return what is known of the codes of so many rows, in memory and on the drive."""
    if not settings.has_coded_tokens:
        return 0
    on_drive = 0 if settings.encrypt_cold_pool is Encryption.YES else 1
    filed = on_drive * code_table_bytes(shape.layers, rows)
    return rows * shape.layers * ROW_TABLE_BYTES + filed


def _chosen(shape: ModelShape, settings: Settings, tokens: int) -> tuple[int, int, int]:
    """Return how many sets a layer chooses, and the tokens and exact tokens of each."""
    kept = settings.kept_tokens
    count = selected_count(tokens, settings.importance_rate, kept, settings.max_selected)
    exact = exact_count(
        tokens, settings.exact_share, settings.exact_floor, min(kept, tokens), count
    )
    return 1 if settings.scope is Scope.LAYER else shape.kv_heads, count, exact


def coded_bytes(
    shape: ModelShape, spec: KernelSpec, settings: Settings, tokens: int, sequences: int = 1
) -> int:
    """Return what a step with coded tokens needs beyond what they are kept in (`coded_step`).

    Weights of all coded tokens of a layer, their codes, all exact rows, and lists of what layers
    choose; 0 where nothing is coded.
    """
    if not settings.has_coded_tokens:
        return 0
    sets, count, exact = _chosen(shape, settings, tokens)
    rows = min(round_up(tokens, GROUP_TOKENS), sets * count)
    codes = rows * (code_row_bytes(spec) + spec.kv_heads)
    if settings.encrypt_cold_pool is not Encryption.YES:
        codes += code_buffer_bytes(spec, most_coded(sets, count, tokens))
    # A shorter context may have more coded tokens, where `max_selected` bounds both.
    weighed = sets * count * weight_bytes(spec)
    lists = _LISTS + _MORE_LISTS * (sequences - 1)
    lists *= split_bytes(sets, *map(with_more, (count, exact, tokens)))
    # Beside a GPU there are others instead.
    weighed += max(lists, sets * count * _PLACE_BYTES)
    if settings.device in HOST_DEVICES:
        # A shorter context may keep products that a longer one does not.
        most = MOST_KEPT_PRODUCT_BYTES // (_PRODUCT_BYTES * spec.query_heads)
        weighed += kept_product_bytes(spec, min(tokens, most // GROUP_TOKENS * GROUP_TOKENS))
    # On a processor exact rows lie in the gather buffers instead, where these hold them.
    return codes + weighed + min(tokens, sets * exact) * shape.row_bytes


def widened_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of a block's keys and values in float32, as a processor attends to them.

    A GPU widens in its own memory; copies to and from it are staged in as many bytes instead.
    """
    channels = shape.kv_heads * shape.head_dim
    return settings.block_rows * 2 * channels * _WIDENED_ITEM_BYTES


def landing_block_rows(settings: Settings) -> int:
    """Return the rows of a block that rows are read ahead to.

    In groups where that divides blocks: little sets of several sequences land side by side.
    """
    whole = settings.block_rows % GROUP_TOKENS == 0
    return GROUP_TOKENS if whole else settings.block_rows


# Caches that take steps together read ahead for as many of them, and prompts for more rows.
_LANDING_SETS = 4


def landing_rows(shape: ModelShape, settings: Settings) -> int:
    """Return how many rows are read ahead at most, whole blocks of them.

    Where tokens are coded, and codes lie in a file, only exact ones come as rows as a rule: the
    longest context's exact tokens, four times, are enough.
    """
    most = settings.prefetch_blocks * settings.block_rows
    if not settings.has_coded_tokens or settings.encrypt_cold_pool is Encryption.YES:
        return most
    sets, _, exact = _chosen(shape, settings, shape.max_positions)
    wanted = _LANDING_SETS * min(shape.max_positions, sets * exact)
    return min(most, round_up(max(1, wanted), landing_block_rows(settings)))


def staging_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of all buffers, which follow from the block size and never the budget."""
    spec = kernel_spec(shape, settings)
    block = round_up(settings.block_rows * shape.row_bytes, PAGE_BYTES)
    gathered = round_up(max(settings.block_rows, GROUP_TOKENS) * shape.row_bytes, PAGE_BYTES)
    landing = round_up(landing_rows(shape, settings) * shape.row_bytes, PAGE_BYTES)
    channels = shape.kv_heads * shape.head_dim
    read = round_up(max(block, shape.row_bytes + 2 * PAGE_BYTES), PAGE_BYTES)
    write_back = round_up(settings.block_rows, GROUP_TOKENS) * shape.row_bytes
    keys = spec.segment_tokens * channels * _KEY_ITEM_BYTES
    return (
        # Rows come to them and go from them in the library, and nothing is on its way between.
        GATHER_BUFFERS * gathered
        # Where rows are read ahead; they go into slots a few at a time.
        + landing
        + read
        + WRITE_BACK_BUFFERS * round_up(write_back, PAGE_BYTES)
        + widened_bytes(shape, settings)
        # Of a segment that is coded from its rows; values are there as well where they are.
        + (2 if settings.has_coded_tokens else 1) * keys
        + scratch_bytes(spec)
        + (sealing_bytes(write_back) if settings.encrypt_cold_pool is Encryption.YES else 0)
    )


def sealing_bytes(write_back_bytes: int) -> int:
    """Return the bytes of rows that are sealed before they are written."""
    return round_up(min(QUANTUM_BYTES, write_back_bytes), PAGE_BYTES)


def _tag_bytes(shape: ModelShape, settings: Settings, rows: int) -> int:
    """Return the bytes of the tags of so many rows, as tables have them."""
    if settings.encrypt_cold_pool is not Encryption.YES:
        return 0
    grown = max(0, rows - TABLE_GROWTH_ROWS)
    own, old = table_bytes(rows * shape.row_bytes), table_bytes(grown * shape.row_bytes)
    # Where rows lie in sealed extents these have tags of their own. One table is there twice while
    # it grows, and not at the same time as one of slots.
    return 2 * own * shape.layers + max(0, old - grown * _SLOT_TABLE_BYTES)
