# SPDX-License-Identifier: Apache-2.0
"""The C interface by its headers: structures that calls are given, and what functions take."""

from __future__ import annotations

import ctypes
from typing import Any

from hillinfer.native.structures import (
    Attending,
    Attention,
    Choice,
    DecodeStep,
    FileReads,
    Landing,
    PageRun,
    Promotion,
    Quota,
    ReadWay,
    Sequence,
    Shape,
)

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_WORD = ctypes.c_uint32

# --- A prompt's attention (prompt_attention.h) ---


class PromptBlock(ctypes.Structure):
    """Queries of a prompt, a block of keys and values, and what softmax over blocks has come to."""

    _fields_ = (
        ("query", _POINTER),
        ("query_head_stride", _LONG),
        ("query_stride", _LONG),
        ("keys", _POINTER),
        ("key_head_stride", _LONG),
        ("key_stride", _LONG),
        ("values", _POINTER),
        ("value_head_stride", _LONG),
        ("value_stride", _LONG),
        ("out", _POINTER),
        ("out_head_stride", _LONG),
        ("out_stride", _LONG),
        ("log_sums", _POINTER),
        ("log_sum_stride", _LONG),
        ("queries", _LONG),
        ("tokens", _LONG),
        ("kv_heads", _INT),
        ("group_size", _INT),
        ("head_dim", _INT),
        ("item_type", _INT),
        ("is_causal", _INT),
        ("scaling", ctypes.c_float),
        ("threads", _INT),
    )


# --- Value codes, and attention over rows and codes (coded.h) ---


class CodedCall(ctypes.Structure):
    """What attention over rows and codes is computed, and for which KV heads."""

    _fields_ = (
        ("query", _POINTER),
        ("kv_heads", _INT),
        ("group_size", _INT),
        ("head_dim", _INT),
        ("stored_type", _INT),
        ("first_head", _INT),
        ("head_count", _INT),
        ("threads", _INT),
    )


class CodedTokens(ctypes.Structure):
    """Coded tokens of one segment."""

    _fields_ = (
        ("aligned", _POINTER),
        ("invalid_keys", _POINTER),
        ("code_rows", _POINTER),
        ("exponents", _POINTER),
        ("exponent_stride", _LONG),
        ("channel_exponents", _POINTER),
        ("means", _POINTER),
        ("stride", _LONG),
        ("tokens", _LONG),
    )


class BlockPartials(ctypes.Structure):
    """Where softmax over blocks goes, or lies."""

    _fields_ = (
        ("powers", _POINTER),
        ("totals", _POINTER),
        ("outputs", _POINTER),
        ("broken", _POINTER),
    )


class CodeSlots(ctypes.Structure):
    """Codes of a layer's tokens by row number; see host/native/coded_slots.h."""

    _fields_ = (
        ("slot_of_row", _POINTER),
        ("worth", _POINTER),
        ("row_count", _LONG),
        ("numbers", _POINTER),
        ("rows", _POINTER),
        ("slot_count", _LONG),
        ("chunks", _POINTER),
        ("row_bytes", _LONG),
        ("step_worth", ctypes.c_float),
        ("most_worth", ctypes.c_float),
    )


class SplitSelection(ctypes.Structure):
    """Selected sets, what of them is exact and what is coded; see host/native/coded_step.h."""

    _fields_ = (
        ("set_rows", _LONG),
        ("sets", _POINTER),
        ("exact", _POINTER),
        ("coded", _POINTER),
        # Bytes: three words of each segment.
        ("segments", ctypes.c_char_p),
        ("segment_count", _LONG),
        ("aligned", _POINTER),
        ("invalid", _POINTER),
        ("arrived", _POINTER),
        ("row_bytes", _LONG),
        ("settled_count", _LONG),
        ("rows_end", _LONG),
        ("rows", _POINTER),
        ("missing", _POINTER),
        ("missing_count", _LONG),
        ("read_count", _LONG),
        ("numbers", _POINTER),
        ("sources", _POINTER),
        ("cold_positions", _POINTER),
        ("cold_rows", _POINTER),
        ("cold_numbers", _POINTER),
        ("cold_count", _LONG),
        ("coming", _POINTER),
    )


class ComingCodes(ctypes.Structure):
    """Codes of tokens on their way from a file; see host/native/coded_step.h."""

    _fields_ = (
        ("awaited", _POINTER),
        ("rows", _POINTER),
        ("numbers", _POINTER),
        ("count", _LONG),
        ("records", _POINTER),
        ("record_bytes", _LONG),
        ("taken", _LONG),
    )


class SplitLanding(ctypes.Structure):
    """What of exact and coded tokens is to be read now; see host/native/coded_step.h."""

    _fields_ = (
        ("way", _POINTER),
        ("exact", _POINTER),
        ("numbers", _POINTER),
        ("coded", _POINTER),
        ("codes", _POINTER),
        ("filed", _POINTER),
        ("begun_ns", _LONG),
        ("exact_ns", _LONG),
        ("coded_ns", _LONG),
        ("came_ns", _LONG),
    )


# --- Rows that a thread lands (lander.h) ---


class LandingErrand(ctypes.Structure):
    """Rows that are to land, and what came of it."""

    _fields_ = (
        ("way", ReadWay),
        ("landing", _POINTER),
        ("outcome", _INT),
        ("is_done", _INT),
        ("started_ns", _LONG),
        ("stopped_ns", _LONG),
    )


class Awaited(ctypes.Structure):
    """What a thread lands, as who is to look at it sees it; see host/native/awaited.h."""

    _fields_ = (
        ("lander", _POINTER),
        ("errand", _POINTER),
        ("nanoseconds", _LONG),
        ("is_over", _INT),
        ("is_whole", _INT),
    )


# --- Sheets that are compared with a prompt (sheets.h) ---


class SheetMatch(ctypes.Structure):
    """What extents begin with, what is wanted of each, and how much of that they cover."""

    _fields_ = (
        ("data", _POINTER),
        ("count", _LONG),
        ("extent_bytes", _LONG),
        ("body_bytes", _LONG),
        ("said", ctypes.c_char_p),
        ("parents", ctypes.c_char_p),
        ("keys", ctypes.c_char_p),
        ("ids", ctypes.c_char_p),
        ("groups", _POINTER),
        ("covered", _POINTER),
        ("version", _WORD),
        ("layers", _WORD),
        ("row_bytes", _WORD),
        ("shadow_bytes", _WORD),
    )


# --- Rows that become keys and values in memory (state_rows.h, block_rows.h, idle_rows.h) ---


class StateRows(ctypes.Structure):
    """Rows of tokens that follow one another, and where their keys and values go."""

    _fields_ = (
        ("rows", _POINTER),
        ("tokens", _LONG),
        ("row_bytes", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("room_items", _LONG),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("stored_type", _INT),
        ("is_widened", _INT),
    )


class BlockRows(ctypes.Structure):
    """Rows of tokens that follow one another, and the blocks of another engine's cache."""

    _fields_ = (
        ("rows", _POINTER),
        ("tokens", _LONG),
        ("row_bytes", _LONG),
        ("position", _LONG),
        ("first", _LONG),
        ("stop", _LONG),
        ("kv_heads", _LONG),
        ("head_dim", _LONG),
        ("block_tokens", _LONG),
        ("item_bytes", _LONG),
        ("block_bytes", _LONG),
        ("blocks", _POINTER),
        ("numbers", _POINTER),
        ("order", _POINTER),
        ("salts", _POINTER),
        ("sums", _POINTER),
    )


class CheckedRows(ctypes.Structure):
    """Groups of rows that are checked and placed at once."""

    _fields_ = (
        ("states", StateRows),
        ("placed", _LONG),
        ("salts", _POINTER),
        ("sums", _POINTER),
    )


# --- Sequences that take a step together (step_rows.h, few_rows.h) ---


class RowStates(ctypes.Structure):
    """Numbers of a batch as the model made them: where a row's heads lie."""

    _fields_ = (
        ("numbers", _POINTER),
        ("row_stride", _LONG),
        ("head_stride", _LONG),
        ("number_type", _LONG),
    )


class StepRow(ctypes.Structure):
    """One sequence, which a whole step is asked for alike."""

    _fields_ = (
        ("tables", _POINTER),
        ("row", _LONG),
        ("selected", _POINTER),
        ("misses", _POINTER),
        ("split", _POINTER),
        ("is_left_out", _INT),
        ("outcome", _INT),
        ("step", DecodeStep),
    )


class StepRows(ctypes.Structure):
    """What a layer of several sequences is asked for."""

    _fields_ = (
        ("rows", _POINTER),
        ("count", _LONG),
        ("layer", _LONG),
        ("variant", _INT),
        ("threads", _INT),
        ("predicted_factor", ctypes.c_float),
        ("query", RowStates),
        ("predicted", RowStates),
        ("out", _POINTER),
    )


class FewRows(ctypes.Structure):
    """Rows of all sequences, and a linear layer that they go through."""

    _fields_ = (
        ("rows", _POINTER),
        ("row_count", _LONG),
        ("row_stride", _LONG),
        ("inputs", _LONG),
        ("weights", _POINTER),
        ("bias", _POINTER),
        ("outputs", _LONG),
        ("out", _POINTER),
        ("threads", _INT),
        ("number_type", _INT),
    )


# --- Functions ---

_SEQUENCE, _CALL, _PARTIALS = map(ctypes.POINTER, (Sequence, CodedCall, BlockPartials))
_ENCODED = [_INT, _SEQUENCE, _POINTER, _POINTER, *[_LONG] * 3, _POINTER, _LONG, _LONG]
_ROWS, _STATES = ctypes.POINTER(StepRows), ctypes.POINTER(RowStates)
_ATTENTION, _CHOICE = map(ctypes.POINTER, (Attention, Choice))
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "hillinfer_version": (_INT, []),
    "hillinfer_has_variant": (_INT, [_INT]),
    "hillinfer_score": (_INT, [_INT, _SEQUENCE, _POINTER]),
    "hillinfer_start": (_INT, [_INT, _SEQUENCE, *[_POINTER] * 4]),
    "hillinfer_score_pieces": (_INT, [_INT, _SEQUENCE, _POINTER, _LONG]),
    "hillinfer_log_weights": (_INT, [_INT, _SEQUENCE, _POINTER, _POINTER, _POINTER]),
    "hillinfer_finish": (_INT, [_INT, _SEQUENCE, _LONG, _POINTER, _POINTER, _POINTER]),
    "hillinfer_finish_groups": (
        _INT,
        [_INT, _SEQUENCE, _POINTER, _LONG, _LONG, *[_POINTER] * 3, _LONG],
    ),
    "hillinfer_statistics": (_INT, [_INT, _SEQUENCE, _POINTER, *[_LONG] * 4, _POINTER, _POINTER]),
    "hillinfer_encode": (
        _INT,
        [_INT, _SEQUENCE, _POINTER, _POINTER, *[_LONG] * 3, _POINTER, _LONG, _LONG],
    ),
    "hillinfer_scale": (_INT, [_SEQUENCE, _CHOICE, _POINTER]),
    "hillinfer_select": (_INT, [_POINTER, _LONG, _LONG, ctypes.POINTER(Quota), _INT, _POINTER]),
    "hillinfer_launches_open": (_INT, [ctypes.POINTER(_POINTER)]),
    "hillinfer_launches_begin": (_INT, [_POINTER, _INT, _SEQUENCE, _POINTER, _LONG]),
    "hillinfer_launches_wait": (_INT, [_POINTER]),
    "hillinfer_launches_close": (None, [_POINTER]),
    "hillinfer_choose": (_INT, [_INT, _SEQUENCE, _CHOICE, _POINTER]),
    "hillinfer_tile_rows": (_INT, []),
    "hillinfer_attention_bytes": (_LONG, [_ATTENTION]),
    "hillinfer_attention_begin": (_INT, [_INT, _ATTENTION, _POINTER]),
    "hillinfer_attention_add": (_INT, [_INT, _ATTENTION, _POINTER, _LONG, _POINTER]),
    "hillinfer_attention_result": (_INT, [_INT, _ATTENTION, _POINTER, _POINTER]),
    "hillinfer_inner_products": (_INT, [_INT, _ATTENTION, _POINTER, _LONG, _POINTER, _LONG]),
    "hillinfer_weighted_sum": (
        _INT,
        [_INT, _ATTENTION, _POINTER, _LONG, _POINTER, _LONG, _POINTER],
    ),
    "hillinfer_pages_close": (None, [_POINTER]),
    "hillinfer_sequence_open": (_INT, [_LONG, _LONG, ctypes.POINTER(_POINTER)]),
    "hillinfer_sequence_fork": (_INT, [_POINTER, ctypes.POINTER(_POINTER)]),
    "hillinfer_sequence_close": (None, [_POINTER]),
    "hillinfer_sequence_layers": (_POINTER, [_POINTER]),
    "hillinfer_sequence_append_groups": (_INT, [_POINTER, _POINTER, _LONG]),
    "hillinfer_sequence_set_length": (None, [_POINTER, *[_LONG] * 3]),
    "hillinfer_sequence_truncate": (None, [_POINTER, _LONG]),
    "hillinfer_sequence_cover_hits": (_INT, [_POINTER, _LONG, _LONG, ctypes.POINTER(_POINTER)]),
    "hillinfer_sequence_describe": (_INT, [_POINTER, _LONG, _POINTER, _LONG]),
    "hillinfer_sequence_note_coded": (None, [_POINTER, _LONG, _LONG]),
    "hillinfer_pool_open": (_INT, [_LONG, _LONG, ctypes.POINTER(_POINTER)]),
    "hillinfer_pool_close": (None, [_POINTER]),
    "hillinfer_pool_cover": (_INT, [_POINTER, _LONG, ctypes.POINTER(_POINTER)]),
    "hillinfer_pool_grow": (None, [_POINTER, _LONG]),
    "hillinfer_pool_free_slots": (_LONG, [_POINTER]),
    "hillinfer_pool_forget": (None, [_POINTER, _LONG, _LONG]),
    "hillinfer_pool_refresh": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _INT]),
    "hillinfer_pool_shrink": (_LONG, [_POINTER, _LONG, ctypes.POINTER(Promotion)]),
    "hillinfer_promote": (_INT, [_POINTER, ctypes.POINTER(Promotion)]),
    "hillinfer_ring_open": (_INT, [ctypes.c_uint32, ctypes.POINTER(_POINTER)]),
    "hillinfer_ring_close": (None, [_POINTER]),
    "hillinfer_read_file": (_INT, [ctypes.POINTER(ReadWay), ctypes.POINTER(FileReads)]),
    "hillinfer_land": (_INT, [ctypes.POINTER(ReadWay), ctypes.POINTER(Landing)]),
    "hillinfer_find_rows": (_LONG, [*[_POINTER] * 3, _LONG, _INT, _POINTER]),
    "hillinfer_has_page_cipher": (_INT, []),
    "hillinfer_cipher_pages": (_LONG, [ctypes.POINTER(PageRun)]),
    "hillinfer_prefix_keys": (_INT, [ctypes.c_char_p, _POINTER, _LONG, _LONG, ctypes.c_char_p]),
    "hillinfer_copy_rows": (None, [_POINTER, _LONG, _LONG, _POINTER]),
    # Every layer calls these at every step: a plain address takes a tenth of a reference's time.
    "hillinfer_store_token": (_LONG, [*[_POINTER] * 2, _INT, _POINTER, _LONG, _POINTER, _LONG]),
    "hillinfer_choose_tokens": (_INT, [_INT, *[_POINTER] * 4]),
    "hillinfer_choose_begin": (_INT, [_INT, _POINTER, _LONG, *[_POINTER] * 4]),
    "hillinfer_choose_end": (_INT, [_POINTER]),
    "hillinfer_attend_tokens": (_INT, [_INT, *[_POINTER] * 6]),
    "hillinfer_decode_step": (_INT, [_INT, *[_POINTER] * 6]),
    "hillinfer_attend_chosen": (_INT, [_POINTER, _INT, *[_POINTER] * 6]),
    "hillinfer_decode_predicted": (_INT, [_INT, *[_POINTER] * 7]),
    "hillinfer_attend_run": (_INT, [ctypes.POINTER(Attending)]),
    "hillinfer_crc32c": (None, [_POINTER, _LONG, _LONG, *[_POINTER] * 2]),
    "hillinfer_row_sums": (None, [_POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    "hillinfer_aligned_tokens": (_INT, [_INT, _SEQUENCE, _POINTER, _LONG, _POINTER, _POINTER]),
    "hillinfer_encode_values": (_INT, _ENCODED),
    "hillinfer_encode_value_rows": (_INT, _ENCODED),
    "hillinfer_coded_attend": (_INT, [_INT, _CALL, _POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    # Every layer calls these at every step.
    "hillinfer_choose_split": (_INT, [_INT, *[_POINTER] * 5]),
    "hillinfer_list_cold": (_INT, [*[_POINTER] * 4, _INT, _LONG, _LONG, _POINTER]),
    "hillinfer_attend_split": (_INT, [_INT, *[_POINTER] * 7]),
    "hillinfer_decode_split": (_INT, [_INT, *[_POINTER] * 7]),
    "hillinfer_code_cold": (_INT, [_INT, *[_POINTER] * 2, _LONG, _LONG, _POINTER]),
    "hillinfer_land_split": (_INT, [_INT, *[_POINTER] * 6]),
    "hillinfer_end_split": (_INT, [_INT, *[_POINTER] * 5]),
    "hillinfer_want_codes": (None, [_POINTER, _POINTER, _LONG]),
    "hillinfer_offer_codes": (_INT, [*[_POINTER] * 4, _LONG, ctypes.POINTER(_LONG)]),
    "hillinfer_exact_blocks": (_INT, [_INT, _CALL, _POINTER, _LONG, _PARTIALS]),
    "hillinfer_coded_blocks": (_INT, [_INT, _CALL, ctypes.POINTER(CodedTokens), _PARTIALS]),
    "hillinfer_merge_blocks": (_INT, [_INT, _CALL, _PARTIALS, _LONG, _POINTER]),
    "hillinfer_lander_open": (_INT, [ctypes.c_uint32, ctypes.POINTER(_POINTER)]),
    "hillinfer_lander_begin": (_INT, [_POINTER, ctypes.POINTER(LandingErrand)]),
    "hillinfer_lander_begin_first": (_INT, [_POINTER, ctypes.POINTER(LandingErrand)]),
    "hillinfer_lander_hold": (None, [_POINTER, _INT]),
    "hillinfer_lander_wait": (None, [_POINTER, ctypes.POINTER(LandingErrand)]),
    "hillinfer_lander_close": (None, [_POINTER]),
    "hillinfer_match_sheets": (None, [ctypes.POINTER(SheetMatch)]),
    "hillinfer_place_states": (None, [ctypes.POINTER(StateRows)]),
    "hillinfer_rows_to_blocks": (None, [ctypes.POINTER(BlockRows)]),
    "hillinfer_rows_from_blocks": (None, [ctypes.POINTER(BlockRows)]),
    "hillinfer_read_to_blocks": (
        _INT,
        [ctypes.POINTER(ReadWay), ctypes.POINTER(FileReads), _POINTER],
    ),
    "hillinfer_offer_rows": (_POINTER, [ctypes.POINTER(CheckedRows), _LONG]),
    "hillinfer_place_offered": (None, [_POINTER, _INT]),
    "hillinfer_await_offered": (_INT, [_POINTER, _INT]),
    "hillinfer_end_offer": (_INT, [_POINTER, _INT]),
    "hillinfer_few_rows": (_INT, [_INT, ctypes.POINTER(FewRows), _LONG]),
    "hillinfer_attend_block": (_INT, [_INT, ctypes.POINTER(PromptBlock)]),
    "hillinfer_attend_rows": (_INT, [_ROWS, _POINTER]),
    "hillinfer_attend_split_rows": (_INT, [_ROWS, _POINTER, _POINTER]),
    "hillinfer_store_rows": (None, [_ROWS, ctypes.POINTER(Shape), _STATES, _STATES, _POINTER]),
}
