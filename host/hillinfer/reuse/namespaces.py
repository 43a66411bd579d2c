# SPDX-License-Identifier: Apache-2.0
"""What the rows of a model depend on, as the namespace of a store and as a session says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields

from hillinfer.model_shape import ModelShape
from hillinfer.sessions.fingerprint import Fingerprint
from hillinfer.store.keys import Namespace
from hillinfer.store.pool_files import StoreError
from hillinfer_model.choices import KeyMode
from hillinfer_model.kernel_spec import CONTRACT_VERSION, KernelSpec

# Of a fingerprint, what changes no row: how shadows are coded, and what made ids of a text.
_NO_MATTER = ("shadow", "tokenizer", "contract_version", "segment_tokens")
_DENSE = "dense"


def dense_namespace(
    fingerprint: Fingerprint,
    shape: ModelShape,
    device: str,
    made_by: Mapping[str, object],
    exactly: Mapping[str, object],
) -> Namespace:
    """Return the namespace of rows that a model made of a prompt that was read densely.

    Parameters
    ----------
    fingerprint, shape
        Of the model, its weights known.
    device
        Type of what computed them, like cpu.
    made_by
        What else decides which bits rows have: an adapter, a way to compute linear layers.
    exactly
        What decides how they are rounded, where that matters.
    """
    facts = asdict(fingerprint)
    for name in _NO_MATTER:
        del facts[name]
    facts |= {"made": _DENSE, "device": device, "made_by": dict(made_by), **exactly}
    return Namespace.of(facts, shape.layers, shape.row_bytes, 0)


def fingerprint_of(about: str, shadow: KeyMode) -> Fingerprint:
    """Return the fingerprint that a session of a namespace's rows has.

    Parameters
    ----------
    about
        Of the namespace.
    shadow
        How its keys are coded.

    Raises
    ------
    StoreError
        Where the rows are not those of a model as it is, which a session belongs to.
    """
    try:
        facts = json.loads(about)
    except ValueError as error:
        raise StoreError(
            "the index was made anew and does not say which model this prompt is of: use the "
            "prompt once with its model, hillinfer generate or hillinfer store put"
        ) from error
    names = {field.name for field in fields(Fingerprint)} - {*_NO_MATTER}
    if not isinstance(facts, dict) or not names <= facts.keys() or facts.get("made") != _DENSE:
        raise StoreError("what is stored was not made by reading a prompt: it is no document")
    if facts["made_by"]:
        raise StoreError(
            f"what is stored was made by {json.dumps(facts['made_by'])} beside the model, which a "
            "session does not keep: read the document again with --save-session"
        )
    spec = KernelSpec(
        facts["head_dim"], facts["kv_heads"], facts["query_heads"] // facts["kv_heads"]
    )
    return Fingerprint(
        contract_version=CONTRACT_VERSION,
        segment_tokens=spec.segment_tokens,
        shadow=shadow.value,
        tokenizer=None,
        **{name: facts[name] for name in names},
    )
