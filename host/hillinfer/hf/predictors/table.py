# SPDX-License-Identifier: Apache-2.0
"""Which family's query is predicted, how, and whether it is by default."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hillinfer.errors import SettingsError
from hillinfer.hf.predictors.opt_predictor import OptPredictor
from hillinfer.hf.predictors.query_predictor import QueryPredictor
from hillinfer.hf.predictors.rotary_predictor import RotaryPredictor
from hillinfer.query_source import QuerySource
from hillinfer.settings import Settings


@dataclass(frozen=True)
class Family:
    """What is known of one family of models.

    Parameters
    ----------
    predictor
        Makes a layer's query.
    default
        What `--query auto` means: `predicted` only where its selections were found to be as good
        on real weights, here (Llama, `make query`) or in print (OPT: InfiniGen, whose selections
        for OPT-6.7B to 30B rest on the same likeness of consecutive attention inputs).
    """

    predictor: QueryPredictor
    default: QuerySource


_FAMILIES = {
    "llama": Family(RotaryPredictor(), QuerySource.PREDICTED),
    "mistral": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen2": Family(RotaryPredictor(), QuerySource.TRUE),
    "qwen3": Family(RotaryPredictor(), QuerySource.TRUE),
    "opt": Family(OptPredictor(), QuerySource.PREDICTED),
}


def predictor_of(model_type: str, wanted: QuerySource) -> QueryPredictor | None:
    """Return what predicts the queries of a family, or None where true queries are to be used.

    Parameters
    ----------
    model_type
        As the model's config names it.
    wanted
        What the settings say.

    Raises
    ------
    SettingsError
        Where predicted queries are asked for and the family has no predictor.
    """
    family = _FAMILIES.get(model_type)
    if family is None:
        if wanted is QuerySource.PREDICTED:
            raise SettingsError(
                f"query=predicted: nothing predicts the queries of {model_type} models; choose "
                f"--query true, or one of the families {', '.join(_FAMILIES)}"
            )
        return None
    source = family.default if wanted is QuerySource.AUTO else wanted
    return family.predictor if source is QuerySource.PREDICTED else None


def with_named_query(settings: Settings, model_type: str) -> Settings:
    """Return settings that name the query; where it is the true one, nothing is read ahead.

    Parameters
    ----------
    settings
        Whose query may be `auto`.
    model_type
        As in `predictor_of`, which see for errors.
    """
    if predictor_of(model_type, settings.query) is None:
        # Blocks that rows land in ahead of their layer would be memory for nothing.
        return replace(settings, query=QuerySource.TRUE, prefetch_blocks=0)
    return replace(settings, query=QuerySource.PREDICTED)
