# SPDX-License-Identifier: Apache-2.0
"""Measures what a narrower key shadow costs in quality, text by text.

python tools/format_quality.py --out build/reports/format_quality.json

The formats of `--shadow` select on the same tokens of the same texts, as `hillinfer-bench quality`
does it, so that what one text differs from another by falls out of their differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hillinfer.models.loader import ModelOutline
from hillinfer.models.registry_model import DEFAULT_MODEL
from hillinfer.models.sources import ModelSource
from hillinfer.settings import Settings
from hillinfer.system.machine import NumberType
from hillinfer_bench.quality.run import evaluate_text
from hillinfer_bench.quality.table import Measures, contract_configuration
from hillinfer_bench.quality.texts import standard_library_samples
from hillinfer_model.choices import KeyMode

FORMATS = (KeyMode.INT8, KeyMode.INT4, KeyMode.INT2)


@dataclass(frozen=True)
class Difference:
    """What one format's measure is above another's, over texts.

    Parameters
    ----------
    mean, standard_error
        Of the differences text by text.
    above
        Texts in which it is above.
    """

    mean: float
    standard_error: float
    above: int

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> Difference:
        """Take the difference `ones` - `others`, at least two texts of each."""
        own = [a - b for a, b in zip(ones, others, strict=True)]
        error = statistics.stdev(own) / len(own) ** 0.5
        return cls(statistics.mean(own), error, sum(one > 0 for one in own))


def compare(measured: dict[str, list[Measures]]) -> dict[str, dict[str, Difference]]:
    """Return what each format's measures are above those of the first, by name."""
    first, *others = measured
    return {
        f"{other} - {first}": {
            name: Difference.of(
                [getattr(one, name) for one in measured[other]],
                [getattr(one, name) for one in measured[first]],
            )
            for name in ("negative_log_likelihood", "kl_divergence", "agreement")
        }
        for other in others
    }


def main() -> None:
    """Measure every format on every text at each α, print differences and write a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/reports/format_quality.json"))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--last", type=int, default=128)
    parser.add_argument("--alpha", type=float, action="append", help="by default 0.05 and 0.1")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    outline = ModelOutline.read(ModelSource.locate(options.model, print), NumberType.AUTO)
    samples = standard_library_samples(outline.tokenizer, options.context, options.texts)
    model = outline.load().model
    alphas = options.alpha or [0.05, 0.1]
    configurations = {
        (alpha, mode): contract_configuration(Settings().changed(alpha=alpha, shadow=mode))
        for alpha in alphas
        for mode in FORMATS
    }
    texts = []
    for sample in samples:
        print(sample.name, flush=True)
        _, *own = evaluate_text(
            model, sample, options.last, list(configurations.values()), options.threads
        )
        texts.append(dict(zip(configurations, own, strict=True)))
        for (alpha, mode), one in texts[-1].items():
            print(f"  α {alpha} {mode.value}: KL {one.kl_divergence:.5f}", flush=True)
    report = {"texts": [sample.name for sample in samples], "context": options.context}
    report["last"] = options.last
    for alpha in alphas:
        measured = {mode.value: [text[alpha, mode] for text in texts] for mode in FORMATS}
        differences = compare(measured)
        for mode, own in measured.items():
            means = [statistics.mean(getattr(one, name) for one in own) for name in asdict(own[0])]
            print(f"α {alpha} {mode}", *(f"{mean:.5f}" for mean in means))
        for pair, by_name in differences.items():
            for name, one in by_name.items():
                print(
                    f"α {alpha} {pair} {name}: {one.mean:+.5f} ± {one.standard_error:.5f}, "
                    f"above in {one.above} of {len(samples)}"
                )
        report[f"alpha {alpha}"] = {
            "measured": {mode: [asdict(one) for one in own] for mode, own in measured.items()},
            "differences": {
                pair: {name: asdict(one) for name, one in by_name.items()}
                for pair, by_name in differences.items()
            },
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
