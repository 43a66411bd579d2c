# SPDX-License-Identifier: Apache-2.0
"""Every configuration on one text, from one dense prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hillinfer.errors import SettingsError
from hillinfer_bench.quality.attention import selecting
from hillinfer_bench.quality.compute_threads import compute_threads
from hillinfer_bench.quality.configurations import Configuration
from hillinfer_bench.quality.measures import Measures, measure
from hillinfer_bench.quality.prefix import Prefix
from hillinfer_bench.quality.teacher_forcing import forced_logits
from hillinfer_bench.quality.texts import TextSample


def evaluate_text(
    model: Any,
    sample: TextSample,
    last: int,
    configurations: Sequence[Configuration],
    threads: int = 1,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[Measures]:
    """Measure the full cache and every configuration on the last tokens of one text.

    All but the last tokens are read densely, once; then the last ones are read by each
    configuration in one forward pass, each token with its own selected set.

    Parameters
    ----------
    model
        A causal language model of transformers, in evaluation mode.
    sample
        The text.
    last
        L, tokens read sparsely.
    configurations
        What to measure.
    threads
        For reading the prefix, and configurations measured at once, each on one thread.
    on_progress
        Called with the number of configurations done, the full cache first.

    Returns
    -------
    Measures of the full cache, then of each configuration.

    Raises
    ------
    SettingsError
        Where `last` leaves nothing to be read densely.
    """
    context = len(sample.token_ids) - 1
    if not 0 < last < context:
        raise SettingsError(f"last={last} must be at least 1 and below the context of {context}")
    next_ids = sample.token_ids[context - last + 1 :]
    forced_ids = sample.token_ids[context - last : context]
    with compute_threads(threads):
        prefix = Prefix.read(model, sample.token_ids[: context - last])
    # Scoring is thousands of small operations, which one thread each serves better than many.
    with compute_threads(1), selecting(model), ThreadPoolExecutor(threads) as workers:
        full = forced_logits(model, prefix, forced_ids, None)
        measured = [measure(full, full, next_ids)]
        on_progress(1)

        def one(configuration: Configuration) -> Measures:
            policy = configuration.policy(prefix.shape)
            return measure(forced_logits(model, prefix, forced_ids, policy), full, next_ids)

        for result in workers.map(one, configurations):
            measured.append(result)
            on_progress(len(measured))
    return measured
