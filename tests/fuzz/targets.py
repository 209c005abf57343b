"""What reads the fuzzed files. Each target takes a folder and may raise nothing but OutpaceError."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outpace import _fast
from outpace.drafters.learned import checkpoint
from outpace.drafters.learned.drafter import Ask
from outpace.drafters.learned.native import NativeEagle
from outpace.drafters.lookup.datastore import Datastore
from outpace.drafters.lookup.retrieval import DOUBT, WEIGHTS
from outpace.models.base import Batch
from outpace.models.native.model import NativeModel, load_native
from outpace.models.weights import safetensors
from outpace.models.weights.gguf import GGUFFile
from outpace.text.tokenizer import Tokenizer
from tests.fuzz import seeds
from tests.oracles.datastore import Search

VOCAB = 6  # below a datastore's greatest token


class Target(NamedTuple):
    seeds: Callable[[], dict[str, seeds.Files]]
    read: Callable[[Path], None]
    share: int  # of all mutations, beside the other targets'


def gguf_header(folder: Path) -> None:
    """The reader, and tensors as numbers."""
    file = GGUFFile.open(folder / "model.gguf")
    for name in file.tensors:
        file.dequantize(name)


def gguf_tokenizer(folder: Path) -> None:
    """Text to tokens and back, and a conversation."""
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(folder / "model.gguf"))
    ids = tokenizer.encode("ab a\u00e4 </s><|im_end|> 123", parse_special=True)
    tokenizer.decode([*ids.tolist(), *range(tokenizer.vocab_size)])
    if tokenizer.has_chat_template:
        tokenizer.render_chat([{"role": "user", "content": "a"}])


@cache
def _runtime() -> Any:
    return _fast.native.Runtime(1)


def _compute(path: Path) -> None:
    model = load_native(path, runtime=_runtime(), kv_memory=1 << 22)
    try:
        n = min(5, model.info.max_length)
        row = model.kv.alloc()
        tokens = np.arange(n, dtype=np.int32) % model.info.vocab_size
        output = model.forward(Batch.pack([row], [tokens], [0], [True]))
        logits = output.logits(np.array([n - 1], np.int32))
        assert logits.shape == (1, model.info.vocab_size)
        model.parts.embed(tokens)
        model.kv.check()
    finally:
        model.close()


def native_gguf(folder: Path) -> None:
    """The native build of a GGUF file, and a forward: any bits may stand in the tensors."""
    _compute(folder / "model.gguf")


def native_folder(folder: Path) -> None:
    """The safetensors reader, and the native build of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in safetensors.read(path).values():
            assert len(tensor.data) == tensor.n_bytes
    _compute(folder)


def datastore(folder: Path) -> None:
    """Both searches of a datastore say the same, and nothing that is no token."""
    store = Datastore(folder, "v")
    native = _fast.native.Datastore(store.arrays, WEIGHTS, DOUBT, VOCAB, store.files)
    reference = Search(store.arrays, WEIGHTS, DOUBT, VOCAB)
    for context in ([3], [1, 2], [0, 6, 1, 5], [4] * 20, [-1, 2, 3], [1, 2**31 - 1]):
        given = np.array(context, np.int32)
        tokens, parents, gains = native.propose(given, 6, 1, 7)
        assert reference.propose(given, 6, 1, 7) == (tokens, parents, gains)
        assert all(0 <= token < VOCAB for token in tokens)


def drafter(folder: Path) -> None:
    """A learned drafter's checkpoint, every tensor of it."""
    its = checkpoint.read(folder)
    for name in its.tensors:
        assert its.tensors[name].size >= 0


@cache
def _beside() -> NativeModel:
    """The target of ``seeds.eagles``."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        path.write_bytes(seeds.eagles_target())
        return load_native(path, runtime=_runtime())


def native_drafter(folder: Path) -> None:
    """The native build of a drafter beside its target, its entries, and a draft."""
    target = _beside()
    its = checkpoint.fit(checkpoint.read(folder), target.info, None)
    head = NativeEagle(target, its, limit=1 << 22)
    try:
        n, vocab = min(5, head.max_length), target.info.vocab_size
        hidden_states = np.ones((n, len(its.config.hidden_layers), target.info.hidden_size), np.float32)
        drafts = head.draft([Ask(0, np.arange(n, dtype=np.int32), hidden_states, 6, 3, 2)])
        assert all(0 <= token < vocab for token in drafts.row(0).tokens)
        assert head.kv.length(0) == n
        head.kv.check([0])
    finally:
        head.close()


TARGETS = {
    "gguf": Target(seeds.gguf, gguf_header, 4),
    "tokenizer": Target(seeds.gguf, gguf_tokenizer, 3),
    "native-gguf": Target(seeds.gguf, native_gguf, 4),
    "safetensors": Target(seeds.folders, native_folder, 4),
    "datastore": Target(seeds.datastores, datastore, 3),
    "drafter": Target(seeds.drafters, drafter, 2),
    "native-drafter": Target(seeds.eagles, native_drafter, 2),
}
