# SPDX-License-Identifier: Apache-2.0
"""The real model and real text, loaded once."""

import pytest


@pytest.fixture(scope="session")
def real_outline(smollm2_folder):
    from hillinfer.models.loader import ModelOutline
    from hillinfer.models.sources import ModelSource
    from hillinfer.system.machine import NumberType

    return ModelOutline.read(ModelSource.locate(str(smollm2_folder), print), NumberType.FLOAT32)


@pytest.fixture(scope="session")
def real_model(real_outline):
    """SmolLM2-135M in float32, so that figures do not depend on what the processor is good at."""
    return real_outline.load().model


@pytest.fixture(scope="session")
def real_ids(real_outline):
    """Token ids of three parts of the Python reference, 2,100 each."""
    from hillinfer_bench.quality.texts import standard_library_samples

    return [
        list(sample.token_ids) for sample in standard_library_samples(real_outline.tokenizer, 2099)
    ]


@pytest.fixture(scope="session")
def read_prefix(real_model, real_ids):
    """The first text as far as a full segment and an open one, as the model has read it."""
    from hillinfer_bench.quality.forced_reading import Prefix

    return Prefix.read(real_model, real_ids[0][:1192])


@pytest.fixture(scope="session")
def recorded_layers(real_model, real_ids, read_prefix):
    """Queries of the last 8 of 1,200 tokens, which fill a segment and begin one, and all keys."""
    from product_decode import Recorded

    from hillinfer.settings import Settings
    from hillinfer_bench.quality.forced_reading import forced_logits, selecting
    from hillinfer_bench.quality.policies import RecentOnly

    everything = Recorded(RecentOnly(Settings().changed(alpha=1.0)))
    with selecting(real_model):
        ids = real_ids[0][read_prefix.tokens :][:8]
        forced_logits(real_model, read_prefix, ids, everything)
    return everything.layers
