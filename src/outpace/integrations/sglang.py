"""Lookups as SGLang's drafter: a speculative algorithm of its own, OUTPACE, on the worker of its NGRAM.

    OUTPACE_DRAFTER=ngram+suffix:history=1 sglang serve --model-path MODEL --speculative-algorithm OUTPACE

SGLang (0.5.23) calls ``register`` in each of its processes, by the entry point ``sglang.srt.plugins``. Its worker
verifies a tree of ``--speculative-num-draft-tokens`` nodes for every request, whatever is proposed, so no policy sizes
drafts. With ``--speculative-ngram-max-bfs-breadth 1`` the trees are chains.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import isfunction, signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError, OutpaceError
from outpace.integrations import lookups
from outpace.integrations.lookups import WIDER, Lookups, likeliest

NAME = "OUTPACE"
METHODS = {"_prepare_draft_tokens": ["self", "batch"], "_update_ngram_corpus": ["self", "batch"]}  # that are replaced

log = logging.getLogger(__name__)


def register() -> None:
    """Make the algorithm known to SGLang. Raises OutpaceError where SGLang is another than it was written for."""
    with _as_known("it has no algorithms of others'"):
        info = import_module("sglang.srt.speculative.spec_info")
        kinds, base = info.SpeculativeAlgorithm, info.CustomSpecAlgo
        ngram = kinds.NGRAM
    # Whatever SGLang asks of an algorithm it answers as NGRAM does; `create_worker` is the registered one's own.
    names = [name for name, value in vars(kinds).items() if isfunction(value) and not name.startswith("_")]
    answers = {name: staticmethod(getattr(ngram, name)) for name in names if name != "create_worker"}
    kind = type("Outpace", (base,), answers)
    kinds.register(NAME, supports_overlap=True, validate_server_args=configured, spec_class=kind)(worker)


def configured(args: Any = None) -> DrafterSpec:
    """The spec in OUTPACE_DRAFTER, for a server with SGLang's ``args`` (None: they are not known). Raises
    DrafterError."""
    text = os.environ.get("OUTPACE_DRAFTER", "")
    if not text:
        raise DrafterError("no drafter is configured: give one in the environment, OUTPACE_DRAFTER=ngram+suffix")
    spec = lookups.checked(text, "SGLang")
    if spec.size is not None:
        raise DrafterError(
            f"{text}: size={spec.size} has no meaning inside SGLang, which verifies as many tokens of every "
            "request as its speculative_num_draft_tokens says: leave size out"
        )
    ranks = getattr(args, "tp_size", 1)
    if isinstance(ranks, int) and ranks > 1 and lookups.files(spec):
        raise DrafterError(
            f"{text}: each of SGLang's {ranks} ranks (its tp_size) drafts by itself, and would verify other tokens "
            "than the others where its file differs: leave file out, or serve with one rank"
        )
    return spec


def worker(_: Any = None) -> type:
    """SGLang's NGRAM worker with drafts of ours. Raises OutpaceError, DrafterError."""
    spec = configured()
    with _as_known("its NGRAM worker differs"):
        base = import_module("sglang.srt.speculative.ngram_worker").NGRAMWorker
        found = {name: list(signature(getattr(base, name)).parameters) for name in METHODS}
    if found != METHODS:
        raise _other(f"its NGRAM worker has {found}")

    class Worker(base):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            configured(given[0] if given else named.get("server_args"))
            with _as_known("its NGRAM worker differs"):
                config = self.model_runner.model_config
                sizes = int(config.vocab_size), int(config.context_len), int(self.draft_token_num)
                chains = int(self.topk) == 1
            self._trees = Trees(spec, *sizes, chains)

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self._trees.draft([])

        def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            gained: list[list[int]] = [[] for _ in batch.reqs]
            if self.enable_overlap and not batch.grammar_needs_sync():  # requests lack the last step's tokens
                tokens, counts = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
                starts = range(0, len(tokens), self.draft_token_num)
                gained = [tokens[start : start + count] for start, count in zip(starts, counts, strict=True)]
            return self._trees.draft(
                [
                    Request(req, req.rid, req.origin_input_ids_unpadded, req.output_ids, new)
                    for req, new in zip(batch.reqs, gained, strict=True)
                ]
            )

        def _update_ngram_corpus(self, batch: Any) -> None:
            """SGLang's own index stays empty: it is not asked."""

    return Worker


class Request(NamedTuple):
    """``it``: SGLang's object; its text is ``prompt``, ``answer`` and ``gained``."""

    it: Any
    rid: str
    prompt: Sequence[int]
    answer: Sequence[int]
    gained: list[int]


@dataclass(slots=True)
class Row(lookups.Row):
    """``it``: SGLang's object for the request."""

    it: Any


class Trees:
    """Drafts in the form of SGLang's NGRAM: a tree of ``nodes`` for every request, the first of which is its last
    token. ``chains``: each node follows the one before."""

    def __init__(self, spec: DrafterSpec, vocab: int, longest: int, nodes: int, chains: bool) -> None:
        self._nodes, self._chains = nodes, chains
        self._most = (WIDER if chains else 1) * (nodes - 1)
        self._lookups = Lookups(spec, vocab, longest, self._most)
        self._rows = dict[str, Row]()
        log.info("outpace drafts in SGLang: %s, %s of %d", spec.text, "chains" if chains else "trees", nodes)

    def close(self) -> None:
        """Save a history, if it has a file; at the latest when the process ends."""
        self._lookups.close()

    def draft(self, requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A tree for each request of the batch: tokens int64 [B * N], and which nodes each one follows or is, int64
        [B * N * N]. What no draft fills is token 0."""
        self._rows = {request.rid: self._row_of(request) for request in requests}
        rows = list(self._rows.values())
        self._lookups.keep(rows)
        self._lookups.draft([(row, self._most) for row in rows])
        count, size = len(rows), self._nodes
        tokens = np.zeros((count, size), np.int64)
        parents = np.zeros((count, size), np.int64)
        if self._chains:
            parents[:, 1:] = np.arange(size - 1)
        for i, row in enumerate(rows):
            drafted, before, gains, _ = self._lookups.step.draft(i)
            tokens[i, 0] = row.tokens[-1]
            if self._chains:
                path = likeliest(before, gains)[: size - 1]
                tokens[i, 1 : len(path) + 1] = [drafted[node] for node in path]
            else:
                tokens[i, 1 : len(drafted) + 1] = drafted
                parents[i, 1 : len(drafted) + 1] = np.array(before, np.int64) + 1
        mask = np.zeros((count, size, size), np.int64)
        for node in range(size):
            mask[:, node] = mask[np.arange(count), parents[:, node]]
            mask[:, node, node] = 1
        return tokens.ravel(), mask.ravel()

    def _row_of(self, request: Request) -> Row:
        """The request's row, with all of its text."""
        start = len(request.prompt)
        row = self._rows.get(request.rid)
        if (
            row is None
            or row.it is not request.it
            or len(row.tokens) > start + len(request.answer) + len(request.gained)
        ):
            number, native = self._lookups.open(start)
            row = Row(number, np.array(request.prompt, np.int32), native, request.it)
        new = [*request.answer[len(row.tokens) - start :], *request.gained]
        row.tokens = np.append(row.tokens, np.array(new, np.int32))
        return row


@contextmanager
def _as_known(otherwise: str) -> Iterator[None]:
    """SGLang is read in the block. Raises OutpaceError where it lacks what is looked for."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("sglang"):
            raise  # a package that SGLang needs is missing
        raise _other(f"{otherwise} ({error})") from error


def _other(how: str) -> OutpaceError:
    try:
        version = import_module("sglang.version").__version__
    except (ImportError, AttributeError):
        version = "of an unknown version"
    return OutpaceError(
        f"SGLang {version} has another interface for speculative algorithms than 0.5.23: {how}. Install that one, or "
        "set its speculative_algorithm to NGRAM"
    )
