# SPDX-License-Identifier: Apache-2.0
"""The KV connector: what vLLM calls, on its scheduler's and on its workers' side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

from hillinfer_vllm.adapters import Adapters
from hillinfer_vllm.kv_blocks import KvBlocks, row_bytes_of
from hillinfer_vllm.loading import Loads, TransferCounts, WorkerSide
from hillinfer_vllm.ranks import RankReports
from hillinfer_vllm.refusals import checked
from hillinfer_vllm.scheduling import SchedulerSide
from hillinfer_vllm.shared_store import (
    ConnectorError,
    OtherRows,
    accepts,
    namespaces,
    opened_store,
)
from hillinfer_vllm.statistics import StoreMetrics, StoreStats, of_other_rank
from hillinfer_vllm.step_plan import StepPlan
from hillinfer_vllm.storing import Publishing, Saves

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_log = init_logger("vllm.hillinfer")


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Brings a step's plan to the workers.

    Parameters
    ----------
    plan
        Of one step.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class RankMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Brings what ranks have written to the scheduler.

    Parameters
    ----------
    reports
        Of one rank, or of several.
    """

    def __init__(self, reports: RankReports) -> None:
        self.reports = reports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return the reports of both."""
        assert isinstance(other, RankMetadata)
        return RankMetadata(self.reports.joined(other.reports))


class HillInferStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Stores prompts of vLLM on drives, and loads them layer by layer while layers compute.

    Parameters
    ----------
    vllm_config, role, kv_cache_config
        As vLLM gives them; the store is named in `kv_connector_extra_config`.

    Raises
    ------
    ConnectorError
        Where no store is named, or vLLM is set up in a way that rows cannot be stored for.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        specs = checked(vllm_config, kv_cache_config, str(current_platform.device_type))
        spec = next(iter(specs.values()))
        row_bytes = row_bytes_of(spec.num_kv_heads, spec.head_size, spec.dtype)
        model = vllm_config.model_config
        config = model.hf_text_config.to_dict()
        facts = _facts(vllm_config, spec.dtype)
        self._layer_count = len(specs)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        every = namespaces(facts, model.model, config, len(specs), row_bytes, ranks)
        self._rank = _rank() if ranks > 1 and role is KVConnectorRole.WORKER else 0
        self._namespace = every[self._rank]
        self._publishing = Publishing.AT_ONCE if ranks == 1 else Publishing.TOGETHER
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        accepted = accepts(extra)
        self._store = opened_store(extra)
        self._counts = TransferCounts()
        self._told = self._counts.by_name()
        self._scheduler: SchedulerSide | None = None
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._block_tokens = vllm_config.cache_config.block_size
        self._block_manager: Any = None
        if role is KVConnectorRole.SCHEDULER:
            facts |= {"hf_overrides": model.hf_overrides or None}
            others = OtherRows.of(self._store, accepted, every, model.model, config, facts)
            lora = vllm_config.lora_config
            adapters = Adapters("" if lora is None else str(lora.lora_dtype))
            self._scheduler = SchedulerSide(
                *(self._store, every, self._block_tokens, _log.warning), others.now, adapters
            )

    # A request whose rows are not stored is answered all the same.
    @property
    def requires_kv_delivery(self) -> bool:
        """Whether an answer depends on rows being stored: never."""
        return False

    # --- the scheduler's side --------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the store has behind the computed ones; loads are synchronous."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Learn which blocks a request's rows go to."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the worker loads and stores in one step."""
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.plan(scheduler_output))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Learn who gives blocks out, and may forget what they hold."""
        self._block_manager = kv_cache_manager

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Have blocks forgotten whose rows did not come, and those computed behind them.

        vLLM knows them as computed since they were given out. A request that is aborted before it
        has computed them anew would leave them to others.
        """
        assert self._scheduler is not None
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, RankMetadata):
            self._scheduler.reported(told.reports)
        if connector_output.invalid_block_ids:
            gone = self._scheduler.failed(connector_output.invalid_block_ids)
            if self._block_manager is not None:
                self._block_manager.evict_blocks(gone)

    def reset_cache(self) -> bool:
        """Look nothing up and store nothing from here on: the weights may be others now."""
        if self._scheduler is not None:
            self._scheduler.rest()
        return True

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let go of a request; its blocks are not looked at any more."""
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as `request_finished`, whose one group of layers this is."""
        return self.request_finished(request, block_ids[0])

    # --- a worker's side -------------------------------------------------------------------

    @property
    def loads(self) -> Loads | None:
        """What brings rows to this worker's blocks; None before it knows them."""
        return self._loads

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the KV blocks of each layer are, and how rows lie in them."""
        from vllm._custom_ops import cpu_attn_reshape_and_cache
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        if len(kv_caches) != self._layer_count:
            raise ConnectorError(
                f"{len(kv_caches)} layers have KV blocks, and {self._layer_count} were said to: "
                "layers that share them are not stored; run vLLM without the connector"
            )

        def put(
            keys: torch.Tensor,
            values: torch.Tensor,
            key_half: torch.Tensor,
            value_half: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            isa = _get_attn_isa(keys.dtype, key_half.shape[2], keys.shape[2])
            cpu_attn_reshape_and_cache(keys, values, key_half, value_half, slots, isa)

        layers = {name: KvBlocks(kv_caches[name], put) for name in _in_order(kv_caches)}
        for name, own in layers.items():
            if (own.block_tokens, own.row_bytes) != (self._block_tokens, self._namespace.row_bytes):
                raise ConnectorError(
                    f"{name} has blocks of {own.block_tokens} tokens and rows of {own.row_bytes} "
                    f"bytes, and {self._block_tokens} and {self._namespace.row_bytes} were said "
                    "to: run vLLM without the connector"
                )
        side = WorkerSide(self._store, self._namespace, layers, self._counts)
        self._loads, self._saves = Loads(side), Saves(side, self._publishing)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Learn what a step will compute: `start_load_kv` comes behind it where nothing loads."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._saves is not None:
            self._saves.publish(connector_metadata.plan.publishes)
            self._saves.begin(connector_metadata.plan.saves)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Have the rows of a step come."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        if self._loads is not None:
            self._loads.begin(metadata.plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer's rows are in their blocks."""
        if self._loads is not None:
            self._loads.wait(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Take the rows that a layer has just computed."""
        if self._saves is not None:
            self._saves.take(layer_name)

    def wait_for_save(self) -> None:
        """End a step: nothing is on its way any more, and what it computed is published."""
        if self._loads is not None and self._saves is not None:
            self._saves.end(self._loads.end())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Learn which requests are over; nothing of theirs is still on its way."""
        if self._saves is not None:
            self._saves.finish(finished_req_ids)
        return None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what this rank has written in the step and waits to publish; None if nothing."""
        written = {} if self._saves is None else self._saves.written()
        return RankMetadata(RankReports.of(written)) if written else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose rows did not come, which vLLM computes anew."""
        return set() if self._loads is None else self._loads.failed_blocks()

    def shutdown(self) -> None:
        """Write what waits, and let the store go."""
        if self._saves is not None:
            self._saves.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._store.close()

    # --- statistics ------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what was loaded and stored since the last call; None where nothing was."""
        totals = self.totals()
        told = {name: total - self._told[name] for name, total in totals.items()}
        # What all ranks did to the same tokens counts once.
        stats = StoreStats(told if not self._rank else of_other_rank(told))
        self._told = totals
        return None if stats.is_empty() else stats

    def totals(self) -> dict[str, float]:
        """Return what was loaded and stored since the start, by the names of `TransferCounts`."""
        return self._counts.by_name()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return statistics that came from a worker."""
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return what gives the statistics out beside vLLM's own metrics."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# --- whose rows they are ---


def _facts(config: VllmConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return what beside weights and the model's config changes the bits of rows."""
    model, load = config.model_config, config.load_config
    return {
        "vllm": vllm.__version__,
        "dtype": str(dtype),
        "quantization": str(model.quantization),
        "quantization_config": str(getattr(model, "quantization_config", None)),
        "load_format": str(load.load_format),
        "loader": str(load.model_loader_extra_config),
        "model_impl": str(model.model_impl),
        # Some models turn keys otherwise where contexts may get longer.
        "max_model_len": model.max_model_len,
    }


def _rank() -> int:
    """Return which of the tensor-parallel ranks this worker is."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _in_order(names: Iterable[str]) -> list[str]:
    """Return layer names by the numbers in them: rows are loaded in the order of layers."""
    return sorted(names, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
