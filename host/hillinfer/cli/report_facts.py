# SPDX-License-Identifier: Apache-2.0
"""The parts of a report that say what a run was and where it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hillinfer.cli.generate_request import GenerateRequest
from hillinfer.cli.preflight import CheckedRun
from hillinfer.cold_dir import prepared_cold_dir
from hillinfer.machine.drive import filesystem_of
from hillinfer.machine.memory import MemoryFacts
from hillinfer.machine.processor import ProcessorFacts
from hillinfer.machine.versions import python_version, run_packages
from hillinfer.model_shape import ModelShape
from hillinfer.models.loader import LoadedModel


def model_facts(loaded: LoadedModel, shape: ModelShape) -> dict[str, Any]:
    """Return name, commit, family, number type and shape."""
    return {
        "name": loaded.name,
        "commit": loaded.commit,
        "model_type": loaded.config.model_type,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "stored_type": shape.stored_type.value,
        "layers": shape.layers,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_positions": shape.max_positions,
    }


def settings_facts(request: GenerateRequest, checked: CheckedRun) -> dict[str, Any]:
    """Return every setting that a repetition of the run needs."""
    settings = checked.settings
    return {
        "alpha": settings.alpha,
        "rule": settings.rule.value,
        "scope": settings.scope.value,
        "query": settings.query.value,
        "shadow": settings.key_mode.value,
        "kept_sinks": settings.kept_sinks,
        "kept_recent": settings.kept_recent,
        "max_selected": settings.max_selected,
        "dram_budget_bytes": settings.dram_budget.byte_count,
        "pool_policy": settings.pool_policy,
        "pool_sizes": settings.pool_sizes.value,
        "device": settings.device,
        "beta": "auto" if settings.beta is None else settings.beta,
        "beta_model": settings.beta_model.value,
        "xclbin": str(settings.xclbin) if settings.xclbin else None,
        "pynq_python": str(settings.pynq_python) if settings.pynq_python else None,
        "block_rows": settings.block_rows,
        "prefetch_blocks": settings.prefetch_blocks,
        "block_tokens": settings.block_tokens,
        "io": settings.io.value,
        "io_threads": settings.io_threads,
        "prefill_chunk": request.chunk_tokens,
        "question_reading": request.question_reading.value,
        "prompt_style": request.prompt_style.value,
        "special_tokens": request.special_tokens.value,
        "max_new_tokens": request.max_new_tokens,
        "projections": request.projections,
        "threads": torch.get_num_threads(),
    }


def version_facts() -> dict[str, str]:
    """Return the versions of the interpreter and of everything generation stands on."""
    packages = {one.name: one.version for one in run_packages() if one.version is not None}
    return {"python": python_version(), **packages}


def machine_facts(cold_dir: Path | None) -> dict[str, Any]:
    """Return what speed depends on."""
    processor, memory = ProcessorFacts.read(), MemoryFacts.read()
    return {
        "processor": processor.name,
        "cores": processor.cores,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "cold_filesystem": filesystem_of(prepared_cold_dir(cold_dir)),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
