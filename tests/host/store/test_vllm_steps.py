# SPDX-License-Identifier: Apache-2.0
"""Both sides of vLLM's connector around a real store, stepped as vLLM steps them.

The engine here computes rows by a formula of layer and tokens; `make vllm-store` steps vLLM itself.
"""

import errno
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from hillinfer.drive.calls import DriveCalls
from hillinfer.store.store import Store
from hillinfer_vllm.kv_blocks import KvBlocks
from hillinfer_vllm.loading import Loads, TransferCounts, WorkerSide
from hillinfer_vllm.scheduling import SchedulerSide
from hillinfer_vllm.shared_store import ConnectorError, namespace, opened_store
from hillinfer_vllm.storing import Saves

BLOCK, HEADS, DIM, LAYERS, BLOCKS = 32, 2, 64, 3, 256
SIZE = 256 << 20
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
IDS = [7 * at % 1000 for at in range(1500)]
OTHER = [11 * at % 1000 for at in range(1500)]


def put(keys, values, key_half, value_half, slots):
    for states, half in ((keys, key_half), (values, value_half)):
        half[slots // BLOCK, :, slots % BLOCK] = states


def rows_of(layer, ids, start, stop):
    """Keys and values that depend on every token so far, as those of a model do."""
    sums = torch.tensor(ids).cumsum(0)[start:stop, None, None, None] + 31 * layer
    at = torch.arange(2 * HEADS * DIM).view(2, HEADS, DIM)
    return ((sums * (at + 1)) % 251).to(torch.bfloat16)


@dataclass(frozen=True)
class Turn:
    """Tokens of one request in a step."""

    name: str
    ids: list
    numbers: list
    start: int
    stop: int
    is_new: bool = True

    @property
    def positions(self):
        return range(self.start, self.stop)


def adapter_in(directory, number=1, **more):
    return SimpleNamespace(lora_int_id=number, lora_path=str(directory), **more)


def request_of(name, ids, salt=None, refused=None, adapter=None, skips=False):
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        cache_salt=salt,
        mm_features=[1] if refused == "images" else [],
        prompt_embeds=torch.zeros(1) if refused == "embeddings" else None,
        pooling_params=object() if refused == "pooled" else None,
        # As vLLM has it of requests for logprobs of their prompts.
        skip_reading_prefix_cache=skips,
        lora_request=adapter or (adapter_in("hub/adapter") if refused == "adapter" else None),
    )


@dataclass
class Engine:
    """Steps requests as vLLM does; its blocks begin empty, as after a restart."""

    store: object
    space: object
    blocks: dict = field(init=False)
    # Makes its rows others than those of a rank beside it.
    shift: int = 0
    # What its scheduler is made with besides.
    asks: dict = field(default_factory=dict)

    def __post_init__(self):
        shape = (BLOCKS, HEADS, BLOCK, 2 * DIM)
        self.blocks = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in NAMES}
        layers = {name: KvBlocks(own, put) for name, own in self.blocks.items()}
        self.counts = TransferCounts()
        self.layers = layers
        self.scheduler = SchedulerSide(self.store, [self.space], BLOCK, **self.asks)
        side = WorkerSide(self.store, self.space, layers, self.counts)
        self.loads, self.saves = Loads(side), Saves(side)
        self.free = list(np.random.default_rng(0).permutation(BLOCKS))

    def read(self, name, ids, chunk=512, computed=0, before_load=None, **more):
        """Read a prompt in chunks; return its blocks, and how many tokens the store gave."""
        request = request_of(name, ids, **more)
        numbers = [int(self.free.pop()) for _ in range(-(-len(ids) // BLOCK))]
        external = self.scheduler.matched(request, computed)
        assert external == self.scheduler.matched(request, computed)
        self.scheduler.allocated(request, numbers, external)
        at, failed, is_new = computed + external, set(), True
        while at < len(ids):
            stop = min(at + chunk, len(ids))
            if before_load is not None:
                before_load()
            self.step([Turn(name, ids, numbers, at, stop, is_new)])
            failed |= self.loads.failed_blocks()
            is_new, at = False, stop
        self.scheduler.finished(name)
        self.saves.finish({name})
        return numbers, external, failed

    def step(self, turns, given=()):
        """Take a step of several requests; what they are given is new blocks of older ones."""
        plan = self.scheduler.plan(self.output_of(turns, dict(given)))
        self.saves.begin(plan.saves)
        self.loads.begin(plan.loads)
        self.compute(turns)
        self.saves.end(self.loads.end())

    @staticmethod
    def output_of(turns, given=MappingProxyType({})):
        """What vLLM's scheduler says of a step."""
        new = [one for one in turns if one.is_new]
        old = [one for one in turns if not one.is_new]
        cached = SimpleNamespace(
            req_ids=[one.name for one in old],
            resumed_req_ids=set(),
            new_block_ids=[(given[one.name],) if one.name in given else None for one in old],
            num_computed_tokens=[one.start for one in old],
        )
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.name, block_ids=(one.numbers,), num_computed_tokens=one.start
                )
                for one in new
            ],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={one.name: one.stop - one.start for one in turns},
        )

    def compute(self, turns):
        """Compute the rows of a step, each layer behind its loads."""
        for layer, layer_name in enumerate(NAMES):
            self.loads.wait(layer_name)
            halves = self.blocks[layer_name].view(BLOCKS, HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
            for one in turns:
                both = rows_of(layer + self.shift, one.ids, one.start, one.stop)
                slots = [one.numbers[at // BLOCK] * BLOCK + at % BLOCK for at in one.positions]
                put(both[:, 0], both[:, 1], *halves, torch.tensor(slots))
            self.saves.take(layer_name)

    def holds(self, ids, numbers):
        """Whether the blocks hold what computing all tokens gives."""
        return all(
            torch.equal(
                self._rows(own, numbers, len(ids)), rows_of(layer + self.shift, ids, 0, len(ids))
            )
            for layer, own in enumerate(self.blocks.values())
        )

    def _rows(self, own, numbers, count):
        halves = own.view(BLOCKS, HEADS, 2, BLOCK, DIM)[numbers]
        return halves.permute(0, 3, 2, 1, 4).reshape(-1, 2, HEADS, DIM)[:count]

    def close(self):
        self.saves.close()
        self.scheduler.close()


@pytest.fixture
def space(tmp_path):
    return space_of(tmp_path)


def space_of(folder, weights=b"weights", **facts):
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(weights)
    facts = {"vllm": "0.32.0", "dtype": "torch.bfloat16"} | facts
    return namespace(facts, str(model), {"rope_theta": 10000.0}, LAYERS, 4 * HEADS * DIM)


@pytest.fixture
def opened(tmp_path, space):
    """Engines one after the other over one store, each as after a restart."""
    stores = []

    def engine(own=None):
        if stores:
            stores[-1][0].close()
            stores[-1][1].close()
        store = opened_store({"store": str(tmp_path / "store"), "store_size": "256MiB"})
        stores.append((Engine(store, own or space), store))
        return stores[-1][0]

    yield engine
    stores[-1][0].close()
    stores[-1][1].close()


def damage(folder):
    """Change a byte in each 4 KiB of what was written."""
    path = folder / "store" / "pool-0.kv"
    size = path.stat().st_blocks * 512
    with path.open("r+b") as file:
        for at in range(256 << 10, size, 4096):
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("chunk", [64, 500, 2048])
def test_a_prompt_that_was_read_is_loaded_after_a_restart(opened, chunk):
    first = opened()
    numbers, external, _ = first.read("a", IDS, chunk)
    assert external == 0
    assert first.holds(IDS, numbers)
    second = opened()
    numbers, external, failed = second.read("b", IDS, chunk)
    # Full groups of 64 tokens are stored, and whole blocks loaded.
    assert external == len(IDS) // 64 * 64
    assert not failed
    assert second.holds(IDS, numbers)
    assert second.counts.loaded_tokens == external
    # The twin: one item of one layer.
    second.blocks[NAMES[1]][numbers[3], 0, 0, 0] += 1
    assert not second.holds(IDS, numbers)


def test_the_last_token_is_computed(opened):
    """A prompt all of which is stored still needs the logits of its end."""
    opened().read("a", IDS[:1024])
    _numbers, external, _ = opened().read("b", IDS[:1024])
    assert external == 1024 - BLOCK


def test_a_longer_prompt_goes_on_from_a_shorter_one(opened):
    opened().read("a", IDS[:700])
    longer = opened()
    numbers, external, _ = longer.read("b", IDS)
    assert external == 700 // 64 * 64
    assert longer.holds(IDS, numbers)
    again = opened()
    numbers, external, _ = again.read("c", IDS)
    assert external == len(IDS) // 64 * 64
    assert again.holds(IDS, numbers)


def test_what_the_engine_has_itself_is_not_loaded(opened):
    opened().read("a", IDS)
    engine = opened()
    _, external, _ = engine.read("b", IDS, computed=10 * BLOCK)
    assert external == len(IDS) // 64 * 64 - 10 * BLOCK


@pytest.mark.parametrize("skips", [True, False])
def test_nothing_is_loaded_where_the_answer_needs_all_tokens_computed(opened, skips):
    """Of loaded tokens there are no logprobs. The twin loads them."""
    opened().read("a", IDS[:700])
    engine = opened()
    numbers, external, _ = engine.read("b", IDS, skips=skips)
    assert external == (0 if skips else 700 // 64 * 64)
    assert engine.counts.loaded_tokens == external
    assert engine.holds(IDS, numbers)
    assert opened().read("c", IDS)[1] == len(IDS) // 64 * 64


@pytest.mark.parametrize("refused", ["images", "embeddings", "adapter", "pooled"])
def test_rows_that_tokens_do_not_decide_are_not_stored(opened, refused):
    engine = opened()
    engine.read("a", IDS, refused=refused)
    assert engine.counts.stored_tokens == 0
    assert opened().read("b", IDS)[1] == 0


@pytest.mark.parametrize(
    "other",
    [
        {"weights": b"other"},
        {"vllm": "0.33.0"},
        {"dtype": "torch.float16"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_rows_of_other_makers_are_not_found(opened, tmp_path, other):
    opened().read("a", IDS)
    assert opened(space_of(tmp_path, **other)).read("b", IDS)[1] == 0
    assert opened(space_of(tmp_path)).read("c", IDS)[1] > 0


def test_another_salt_finds_nothing(opened):
    opened().read("a", IDS, salt="one")
    engine = opened()
    assert engine.read("b", IDS, salt="two")[1] == 0
    assert engine.read("c", IDS)[1] == 0
    assert engine.read("d", IDS, salt="one")[1] > 0


def test_damaged_rows_are_told_and_what_lies_behind_them_is_not_stored(opened, tmp_path):
    opened().read("a", IDS)
    engine = opened()
    numbers, external, failed = engine.read("b", IDS, before_load=lambda: damage(tmp_path))
    assert failed == set(numbers[: external // BLOCK])
    assert engine.counts.failed_loads == 1
    # vLLM computes them anew; another engine finds none of what was computed behind them.
    fresh = opened()
    numbers, external, failed = fresh.read("c", IDS)
    assert not failed
    assert fresh.holds(IDS, numbers)


class Stumbling(DriveCalls):
    """The first read of each call brings bytes from elsewhere, and says what it is told to."""

    told = 0

    def read_to_blocks(self, way, reads, address, rows):
        offsets = reads.file_offsets.copy()
        offsets[0] += 64 * 4 * HEADS * DIM
        results = super().read_to_blocks(way, replace(reads, file_offsets=offsets), address, rows)
        results[0] = self.told
        return results


@pytest.mark.parametrize("told", [0, 4096, -errno.EIO])
def test_a_read_that_brings_less_is_made_again_and_one_that_fails_is_told(
    opened, tmp_path, space, told
):
    opened().read("a", IDS)
    # The first one ends, and all that it stores is there.
    opened()
    calls = Stumbling()
    calls.told = told
    store = Store(tmp_path / "store", calls=calls)
    engine = Engine(store, space)
    numbers, external, failed = engine.read("b", IDS)
    assert external == len(IDS) // 64 * 64
    if told < 0:
        assert failed == set(numbers[: external // BLOCK])
        assert engine.counts.failed_loads == 1
    else:
        assert not failed
        assert engine.holds(IDS, numbers)
    engine.close()
    store.close()


@pytest.mark.parametrize(
    ("missing", "left"),
    [
        ("damaged", ""),
        ("damaged", "b"),
        ("damaged", "bc"),
        ("out of reach", ""),
        ("out of reach", "c"),
        (None, ""),
    ],
)
def test_what_another_request_computed_behind_missing_rows_is_not_stored(
    opened, tmp_path, missing, left
):
    """Both have the document's blocks; the second finds them in the engine, still on their way.

    vLLM ends requests whose clients left before it tells what became of the step's loads.
    """
    document, first, second = IDS[:1024], [1] * 300, [2] * 300
    opened().read("a", [*document, 0])
    engine = opened()
    shared = [int(engine.free.pop()) for _ in range(1024 // BLOCK)]
    turns = []
    for name, own, computed in (("b", first, 0), ("c", second, 1024)):
        ids = document + own
        numbers = shared + [int(engine.free.pop()) for _ in range(-(-300 // BLOCK))]
        external = engine.scheduler.matched(request_of(name, ids), computed)
        engine.scheduler.allocated(request_of(name, ids), numbers, external)
        turns.append(Turn(name, ids, numbers, 1024, len(ids)))
    if missing == "damaged":
        damage(tmp_path)
    elif missing:
        # The document stays in the store, and so would whatever is published behind it.
        gone = opened_store({"store": str(tmp_path / "store")})
        engine.loads = Loads(WorkerSide(gone, engine.space, engine.layers, engine.counts))
        gone.close()
    engine.step(turns)
    failed = engine.loads.failed_blocks()
    assert failed == (set(shared) if missing else set())
    for name in left:
        engine.scheduler.finished(name)
    # The engine is told to forget those, and all that was computed behind them.
    gone = engine.scheduler.failed(failed)
    everything = {number for one in turns for number in one.numbers}
    assert gone == (everything if missing else set())
    engine.saves.finish({"b", "c"})
    fresh = opened()
    for name, own in (("d", first), ("e", second)):
        external = fresh.scheduler.matched(request_of(name, document + own), 0)
        # One token behind a prefix is computed; all of the document ends a block.
        assert external == {"damaged": 0, "out of reach": 1024, None: 1024 + 256}[missing]


def test_a_request_whose_rows_did_not_come_is_promised_none_of_them_again(opened, tmp_path):
    opened().read("a", IDS)
    engine = opened()
    request = request_of("b", IDS)
    numbers = [int(engine.free.pop()) for _ in range(-(-len(IDS) // BLOCK))]
    external = engine.scheduler.matched(request, 0)
    engine.scheduler.allocated(request, numbers, external)
    damage(tmp_path)
    engine.step([Turn("b", IDS, numbers, external, len(IDS))])
    assert engine.scheduler.matched(request, 0) == external
    engine.scheduler.failed(engine.loads.failed_blocks())
    assert engine.scheduler.matched(request, 0) == 0


@pytest.mark.parametrize("is_one_step", [True, False])
def test_two_prompts_with_one_beginning_are_both_stored(opened, is_one_step):
    """In one step, or one after the other though both were looked up before."""
    engine = opened()
    turns = []
    for name, own in (("a", [1] * 300), ("b", [2] * 300)):
        ids = IDS[:512] + own
        numbers = [int(engine.free.pop()) for _ in range(-(-len(ids) // BLOCK))]
        assert engine.scheduler.matched(request_of(name, ids), 0) == 0
        turns.append(Turn(name, ids, numbers, 0, len(ids)))
    for part in [turns] if is_one_step else [turns[:1], turns[1:]]:
        engine.step(part)
    engine.saves.finish({"a", "b"})
    fresh = opened()
    for name, own in (("c", [1] * 300), ("d", [2] * 300)):
        ids = IDS[:512] + own
        numbers, external, _ = fresh.read(name, ids)
        assert external == (512 + 300) // 64 * 64
        assert fresh.holds(ids, numbers)


def test_why_a_request_is_left_out_is_said_once(opened, space):
    lines = []
    scheduler = SchedulerSide(opened().store, [space], BLOCK, lines.append)
    for name, refused in (("a", "images"), ("b", "images"), ("c", "adapter"), ("d", None)):
        scheduler.matched(request_of(name, IDS, refused=refused), 0)
        scheduler.matched(request_of(name, IDS, refused=refused), 0)
    scheduler.close()
    assert len(lines) == 2
    assert "images or sound" in lines[0]
    assert "its adapter does not lie in a directory" in lines[1]


def test_an_engine_with_other_weights_finds_and_stores_nothing(opened):
    opened().read("a", IDS)
    engine = opened()
    engine.scheduler.rest()
    assert engine.read("b", IDS)[1] == 0
    engine.read("c", OTHER)
    assert engine.counts.stored_tokens == 0
    assert opened().read("d", OTHER)[1] == 0


def test_two_engines_share_a_store(opened, tmp_path, space):
    first = opened()
    other_store = opened_store({"store": str(tmp_path / "store")})
    other = Engine(other_store, space)
    first.read("a", IDS)
    first.saves.close()
    numbers, external, _ = other.read("b", IDS)
    assert external == len(IDS) // 64 * 64
    assert other.holds(IDS, numbers)
    other.close()
    other_store.close()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "no store is named"),
        ({"store": 3}, "no store is named"),
        ({"store": "DIR"}, "add 'store_size'"),
        ({"store": "DIR", "store_size": "10%"}, "is a share"),
        ({"store": "DIR", "size": "10GB"}, "'size', which is unknown"),
    ],
)
def test_what_is_said_of_the_store_is_checked(tmp_path, extra, said):
    extra = {key: str(tmp_path / "none") if one == "DIR" else one for key, one in extra.items()}
    with pytest.raises(ConnectorError, match=said):
        opened_store(extra)


def test_a_model_without_weights_on_this_machine_is_refused(tmp_path):
    with pytest.raises(ConnectorError, match="no weights"):
        namespace({}, str(tmp_path), {}, 1, 64)
