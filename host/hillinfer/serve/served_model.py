# SPDX-License-Identifier: Apache-2.0
"""A model with HillInfer on it, as a server uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hillinfer.catalogue.checks import ServedAnswer
from hillinfer.catalogue.form_cache import Move
from hillinfer.catalogue.placed import PlacedDocuments
from hillinfer.catalogue.planning import DocumentRules
from hillinfer.drive.calls import DriveCalls
from hillinfer.errors import BudgetError
from hillinfer.generate.answering import Generation
from hillinfer.hf.attach import Attachment
from hillinfer.hf.cache import HillInferCache
from hillinfer.models.loader import LoadedModel
from hillinfer.projections.step_products import StepProducts
from hillinfer.reuse.model_prompts import ModelPrompts
from hillinfer.serve.answers import Grammars
from hillinfer.serve.chats import PromptTokens
from hillinfer.serve.rules import ServerRules
from hillinfer.settings import Settings
from hillinfer.statistics import CacheStatistics
from hillinfer.store.keys import Reuse
from hillinfer.store.store import Store


@dataclass(frozen=True)
class StoreOfServer:
    """The store of a server.

    Parameters
    ----------
    store
        Open, and closed by whoever opened it.
    reuse
        Where a stored prefix may end.
    salt
        Of requests without a key; those with one have salts of their own behind it.
    made_by
        What else decides which bits rows have.
    documents
        How its documents are placed while nobody waits; None: they rest.
    accept
        Engines whose rows of the same model are taken, too.
    """

    store: Store
    reuse: Reuse = Reuse.LONGEST
    salt: bytes = b""
    made_by: Mapping[str, object] = field(default_factory=dict)
    documents: DocumentRules | None = field(default_factory=DocumentRules)
    accept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Begun:
    """A sequence that a prompt is read into.

    Parameters
    ----------
    generation
        Of the sequence.
    held
        How many tokens of the prompt it has.
    form, document
        Name of the form that they came from, and its document's key; None where the store is still
        to be asked.
    """

    generation: Generation
    held: int = 0
    form: str | None = None
    document: bytes | None = None

    def reading(self, ids: Sequence[int]) -> Iterator[int]:
        """Read a prompt as `Generation.reading` does, those that are held counted among them."""
        return (self.held + done for done in self.generation.reading(ids[self.held :]))


class ServedModel:
    """A model that is attached; other threads use `prompts` and `grammars` alone.

    Parameters
    ----------
    loaded, attachment
        The model, and HillInfer on it.
    products
        Entered for steps: its linear layers are computed otherwise in them.
    rules
        Of the server.
    stored
        Its store; None for none.
    base
        Prompts of requests without a key in it; None without a store.

    Attributes
    ----------
    name
        What clients call it.
    context_tokens
        Most tokens of prompt and answer.
    chunk_tokens
        Of a pass that reads a prompt.
    prompts
        Makes tokens of what clients send; any thread may use it.
    grammars
        Makes states of forms that answers are to have; likewise.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attachment: Attachment,
        products: AbstractContextManager[object],
        rules: ServerRules,
        stored: StoreOfServer | None = None,
        base: ModelPrompts | None = None,
    ) -> None:
        self._loaded, self._attachment = loaded, attachment
        self._products = products
        self.chunk_tokens = rules.chunk_tokens
        self._stored, self._base = stored, base
        self._tenants: dict[bytes, ModelPrompts] = {}
        self._anchor: HillInferCache | None = None
        self._counted: CacheStatistics | None = None
        self._placed: PlacedDocuments | None = None
        self._telling = threading.Lock()
        self.name = rules.alias or loaded.name
        positions = loaded.shape.max_positions
        self.context_tokens = min(rules.context_tokens or positions, positions)
        self.words = int(loaded.model.get_input_embeddings().num_embeddings)
        self.prompts = PromptTokens(loaded.tokenizer, self.words, self.context_tokens)
        self.grammars = Grammars(loaded.tokenizer, self.words, loaded.stop_ids)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for decoding."""
        return self._loaded.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._loaded.stop_ids

    @property
    def store(self) -> Store | None:
        """The store; None for none."""
        return None if self._stored is None else self._stored.store

    def renew(self) -> None:
        """Open the engine, anew where one is open whose drive has failed.

        No generation may be open.

        Raises
        ------
        HillInferError
            As `Attachment.new_cache` says.
        """
        self.let_go()
        # The engine goes with its last cache: this one has no tokens and stays.
        self._anchor = self._attachment.new_cache(expected_tokens=1)
        self._placed = self._placing()
        self.count()

    def let_go(self) -> None:
        """Let the engine go; harmless when done twice."""
        placed, self._placed = self._placed, None
        if placed is not None:
            placed.close()
        anchor, self._anchor = self._anchor, None
        if anchor is not None:
            anchor.close()

    def rest(self, is_over: Callable[[], bool]) -> list[Move]:
        """Make forms of stored documents while nobody waits, until all are or `is_over()`."""
        return [] if self._placed is None else self._placed.settle(is_over)

    def note_answer(self, begun: Begun, ids: Sequence[int], answer: Sequence[int]) -> None:
        """Learn what was answered from a form to a prompt, each token the most probable one."""
        if self._placed is not None and begun.form is not None and begun.document is not None:
            served = ServedAnswer(begun.form, tuple(ids[begun.held :]), tuple(answer))
            self._placed.note(begun.document, served)

    @property
    def placed(self) -> PlacedDocuments | None:
        """The documents that are kept ready; None without a store, or where they rest."""
        return self._placed

    def begin(self, tenant: bytes, ids: Sequence[int], tokens: int, sequences: int = 1) -> Begun:
        """Return a generation for a prompt, behind a document's form where one is made.

        Documents that are open in the engine give way where the budget holds it without them.

        Parameters
        ----------
        tenant
            Whose stored prompts it finds, and whoever's it leaves.
        ids
            Token numbers of the prompt.
        tokens, sequences
            Most that it will have, and of how many forks at once.

        Raises
        ------
        BudgetError
            Where the budget does not hold them beside what is open.
        HillInferError
            As `Attachment.new_cache` says.
        """
        tokens = min(tokens, self.context_tokens)
        while True:
            try:
                return self._begun(tenant, ids, tokens, sequences)
            except BudgetError:
                if self._placed is None or not self._placed.give_up_for(tokens, sequences):
                    raise

    def step(self, generations: list[Generation], token_ids: list[int]) -> None:
        """Give each generation a token, in one forward pass.

        Where several sequences may be open, a step's products are the same whoever else takes it;
        where one may, they are those that it would have without a server, bit by bit.
        """
        with self._products:
            if len(generations) == 1:
                generations[0].step(token_ids[0])
                return
            joined = self._attachment.join([one.cache for one in generations])
            Generation.step_together(self._loaded.model, joined, generations, token_ids)

    def joins(self, generation: Generation) -> bool:
        """Return whether a generation can step with others: not in an ordinary cache."""
        return isinstance(generation.cache, HillInferCache)

    def count(self) -> None:
        """Note what the engine did until now, for `statistics`."""
        counted = self._attachment.statistics()
        with self._telling:
            self._counted = counted

    @property
    def statistics(self) -> CacheStatistics | None:
        """What the engine had done when it was last noted; any thread may ask, and none waits."""
        with self._telling:
            return self._counted

    # --- inside ----------------------------------------------------------------------------

    def _begun(self, tenant: bytes, ids: Sequence[int], tokens: int, sequences: int) -> Begun:
        # Of other tenants nothing is told, not even by how soon an answer comes.
        if self._placed is not None and not tenant:
            found = self._placed.open(ids, tokens, sequences)
            if found is not None:
                return Begun(found.generation, found.tokens, found.form, found.key)
        cache: HillInferCache = self._attachment.new_cache(
            expected_tokens=tokens, sequences=sequences, prompts=self._prompts_of(tenant)
        )
        own = Generation(self._loaded.model, cache, self.chunk_tokens, self._products)
        return Begun(own)

    def _placing(self) -> PlacedDocuments | None:
        """Return what keeps documents ready beside the engine that is open."""
        stored, accountant = self._stored, self._attachment.accountant
        if stored is None or self._base is None or stored.documents is None or accountant is None:
            return None
        if stored.reuse is Reuse.EXACT:
            # Who asks for the bits of an unbroken run is not answered from a smaller form.
            return None
        return PlacedDocuments(
            self._attachment,
            self._base,
            stored.store,
            accountant,
            stored.documents,
            self.chunk_tokens,
        )

    def _prompts_of(self, tenant: bytes) -> ModelPrompts | None:
        if self._base is None or self._stored is None or not tenant:
            return self._base
        if tenant not in self._tenants:
            self._tenants[tenant] = self._base.of_tenant(self._stored.salt + tenant)
        return self._tenants[tenant]


@contextmanager
def served_model(
    loaded: LoadedModel,
    settings: Settings,
    rules: ServerRules,
    stored: StoreOfServer | None = None,
    steps: AbstractContextManager[object] | None = None,
    calls: DriveCalls | None = None,
) -> Iterator[ServedModel]:
    """Attach to a model, and keep its engine open between requests.

    Parameters
    ----------
    loaded
        The model.
    settings
        Of all caches.
    rules, stored
        As in `ServedModel`.
    steps
        What is entered for steps where one sequence may be open at a time; see `Generation`.
    calls
        How the drive is reached; the operating system itself where None.

    Raises
    ------
    HillInferError
        As `hillinfer.attach` and `Attachment.new_cache` say.
    """
    base = None
    if stored is not None:
        rounding = {"block_rows": settings.block_rows}
        base = ModelPrompts(
            *(stored.store, loaded.model, stored.reuse, stored.salt, stored.made_by, rounding),
            accept=stored.accept,
        )
    with Attachment(loaded.model, settings, calls, prompts=base) as attachment:
        # An answer alone has the bits that it has beside others, unless there are never others.
        products = StepProducts(loaded.model) if rules.parallel > 1 else steps or nullcontext()
        served = ServedModel(loaded, attachment, products, rules, stored, base)
        try:
            served.renew()
            yield served
        finally:
            served.prompts.close()
            served.let_go()
