# SPDX-License-Identifier: Apache-2.0
"""Keys and queries of a real model reading real text."""

import sys
from pathlib import Path

RECORDED_TOKENS = 1100

sys.path.append(str(Path(__file__).parents[1] / "host" / "quality"))


def record_layer(folder):
    """One layer of a model reading real text: FP16 keys (N, kv, d), a query (H, d), the scaling."""
    import numpy as np
    from product_decode import Recorded

    from hillinfer.models.loader import ModelOutline
    from hillinfer.models.sources import ModelSource
    from hillinfer.settings import Settings
    from hillinfer.system.machine import NumberType
    from hillinfer_bench.quality.forced_reading import Prefix, forced_logits, selecting
    from hillinfer_bench.quality.policies import RecentOnly
    from hillinfer_bench.quality.texts import standard_library_samples

    outline = ModelOutline.read(ModelSource.locate(str(folder), print), NumberType.FLOAT32)
    model = outline.load().model
    sample = standard_library_samples(outline.tokenizer, RECORDED_TOKENS)[0]
    ids = list(sample.token_ids)[:RECORDED_TOKENS]
    everything = Recorded(RecentOnly(Settings().changed(alpha=1.0)))
    prefix = Prefix.read(model, ids[:-1])
    with selecting(model):
        forced_logits(model, prefix, ids[-1:], everything)
    layer = everything.layers[len(everything.layers) // 2]
    keys = layer.keys.float().numpy().astype(np.float16).view(np.uint16)
    return keys, layer.queries[0].float().numpy(), layer.scaling
