"""A learned drafter's checkpoint: a folder with config.json and safetensors, in any layout of layouts.py.

Whatever the layout, what is read has one form: the tensors of ``tensor_shapes`` by their canonical names, float32;
``d2t`` int64 [D] (the target's id of draft token i is ``i + d2t[i]``, ascending) and ``t2d`` bool [V]; the output rows
(``head_shapes``) and the embedding where the file has them, otherwise they are the target's.

Ours is speculators' layout (Medusa: vLLM's) with an object ``outpace`` in config.json: format, method, head ("target":
the head is the target's rows ``d2t``, the embedding the target's), target, recipe, tree, a checksum of the tensors, and
quantized ("q4_1": matrices are uint8 [rows, cols / 32 * 20], see models/weights/q4_1.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from outpace.common.files import StrPath, write_json
from outpace.drafters.learned import layouts
from outpace.drafters.learned.config import (
    Config,
    EagleConfig,
    MedusaConfig,
    ParallelConfig,
    eagle_layers,
    embedding_shape,
    head_shapes,
    hidden_of,
    tensor_shapes,
)
from outpace.errors import DrafterError, ModelError, ParameterError
from outpace.models.base import ModelInfo
from outpace.models.weights import pickles, q4_1, safetensors
from outpace.models.weights.facts import Facts, read_config
from outpace.models.weights.file_bytes import StoredTensor

FORMAT = 1
WEIGHTS = "model.safetensors"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q4_1": "BF16"}  # q4_1: of what is no matrix
Q4_1 = "Q4_1"  # a stored tensor's type

_Array = Any  # a numpy array: float32, int64 or bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trained drafter. ``tensors``: canonical name -> numpy array; from a file, read when asked for, each time.

    ``target``, ``recipe``: what it was trained beside and how; empty for one that was not trained here.
    """

    method: str  # "eagle", "parallel" or "medusa"
    config: Config
    tensors: Mapping[str, _Array]
    target: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)


def read(path: StrPath) -> Checkpoint:
    """The checkpoint in a folder. Raises ModelError that names the file, the problem and the remedy."""
    folder = Path(path)
    if not folder.is_dir():
        alone = " (of drafters in GGUF files Gemma 4's assistant alone is read)" if folder.is_file() else ""
        raise ModelError(f"{folder} is not a folder: give a drafter's, with config.json and {WEIGHTS}{alone}")
    config = read_config(folder)
    facts = Facts(str(folder / "config.json"), config, verdict="is no drafter that can be read")
    files, stored = safetensors.read_folder(folder)
    if not files:
        if not (files := pickles.files(folder)):
            raise ModelError(f"{folder} has no weights: get its {WEIGHTS}")
        stored = safetensors.read(pickles.converted(files))
    own = facts.part("outpace")
    if config.get("outpace"):
        _check_own(own, folder)
        if own.get("quantized") == "q4_1":
            stored = {name: _quantized(tensor) for name, tensor in stored.items()}
    names = layouts.canonical(stored, config)
    found = {name: stored[stored_name] for name, stored_name in names.items()}
    method, described = layouts.describe(facts, own, config, {name: tensor.shape for name, tensor in found.items()})
    if own.get("method", method) != method:
        raise own.fail(f"its method is {own.get('method')!r}, but its layout is of {method!r}: export it again")
    tensors = _tensors(facts, described, found, head_needed=_head_needed(own, described))
    return Checkpoint(method, described, tensors, _object(own, "target"), _object(own, "recipe"))


def method_of(path: StrPath) -> str | None:
    """The method of the drafter that a folder holds; None where it holds none that can be read."""
    try:
        return read(path).method
    except ModelError:
        return None


def _quantized(tensor: StoredTensor) -> StoredTensor:
    if tensor.type != "U8" or len(tensor.shape) != 2 or tensor.shape[1] % q4_1.BYTES:
        return tensor
    return replace(tensor, type=Q4_1, shape=(tensor.shape[0], tensor.shape[1] // q4_1.BYTES * q4_1.BLOCK))


def fit(checkpoint: Checkpoint, info: ModelInfo, fingerprint: str | None, *, training: bool = False) -> Checkpoint:
    """The checkpoint as it is used beside a target: default hidden layers become the target's layers.

    Raises DrafterError where hidden size, vocabulary or hidden layers do not fit, and, for ``training``, beside another
    target than the one it was trained for. To run it there costs acceptance only: see ``stranger``.
    """
    fitted = fit_shape(checkpoint, info.name, (info.vocab_size, info.hidden_size), info.layers)
    config = fitted.config
    if not training and not isinstance(config, MedusaConfig) and config.decoder.rope.plain:
        # Rotations that are not stretched hold at any position: what was trained on short texts goes on drafting.
        decoder = replace(config.decoder, max_length=max(config.decoder.max_length, info.max_length))
        fitted = replace(fitted, config=replace(config, decoder=decoder))
    if training and not isinstance(config, MedusaConfig) and config.decoder.windows:
        raise DrafterError("the drafter's layers have windows, which training here does not: start a new one")
    if training and (problem := stranger(checkpoint, info, fingerprint)):
        raise DrafterError(f"{problem}: start a new one, or train beside its own target")
    return fitted


def fit_shape(checkpoint: Checkpoint, name: str, rows: tuple[int, ...], layers: int) -> Checkpoint:
    """``fit`` beside a target that is known by its output head [V, h] and its layers."""
    config, (vocab, hidden) = checkpoint.config, rows
    remedy = "use a drafter that was trained for this target"
    if hidden_of(config) != hidden:
        own = hidden_of(config)
        raise DrafterError(f"the drafter reads hidden states of {own} numbers, and {name} has {hidden}: {remedy}")
    if config.vocab != vocab:
        raise DrafterError(f"the drafter's vocabulary has {config.vocab} tokens, and {name}'s {vocab}: {remedy}")
    if isinstance(config, MedusaConfig):
        return checkpoint
    if isinstance(config, EagleConfig) and not config.hidden_layers:
        config = replace(config, hidden_layers=eagle_layers(layers))
    low, high = min(config.hidden_layers), max(config.hidden_layers)
    if low < 0 or high >= layers or list(config.hidden_layers) != sorted(set(config.hidden_layers)):
        raise DrafterError(
            f"the drafter reads the outputs of layers {list(config.hidden_layers)}, and {name} has layers "
            f"0 to {layers - 1}: {remedy}"
        )
    return replace(checkpoint, config=config)


def beyond(checkpoint: Checkpoint, info: ModelInfo) -> str | None:
    """What to tell of contexts that are longer than the drafter's own, or None where none can be."""
    if isinstance(checkpoint.config, MedusaConfig) or checkpoint.config.decoder.max_length >= info.max_length:
        return None
    own = checkpoint.config.decoder
    then = "fewer of its drafts may be accepted" if own.rope.plain else "it drafts nothing, as its rotations end there"
    return f"the drafter was made for contexts of {own.max_length} tokens, and {info.name} takes more: beyond, {then}"


def stranger(checkpoint: Checkpoint, info: ModelInfo, fingerprint: str | None) -> str | None:
    """What to tell where the drafter was trained beside another target (even another quantisation of it), or None."""
    trained = checkpoint.target.get("fingerprint")
    if trained is None or fingerprint is None or trained == fingerprint:
        return None
    name = checkpoint.target.get("name", "another target")
    return f"the drafter was trained beside {name} ({trained}), and this is {info.name} ({fingerprint})"


def write(
    path: StrPath,
    method: str,
    config: Config,
    tensors: Mapping[str, Any],
    target: Mapping[str, Any],
    recipe: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
) -> None:
    """Write a drafter in our layout. ``tensors``: canonical names, numpy arrays or torch tensors; others are left out.

    Output rows are written where ``tensors`` has them; otherwise they are the target's, as the embedding is. Raises
    ModelError for a tensor that is missing or of another shape, ParameterError for ``dtype``, OSError.
    """
    head = "own" if next(iter(head_shapes(config))) in tensors else "target"
    put(Path(path), Checkpoint(method, config, tensors, target, recipe), head, layouts.Verifier(), dtype)


def put(
    folder: Path, checkpoint: Checkpoint, head: str, verifier: layouts.Verifier, dtype: str, tokens: int = 4
) -> None:
    """Write a checkpoint in our layout, with ``head`` "own" or "target". Raises as ``write`` does."""
    config = checkpoint.config
    arrays = arrays_of(folder, checkpoint, head == "own")
    if isinstance(config, MedusaConfig):
        described = layouts.to_medusa(config)
        if config.draft_vocab < config.vocab:
            arrays["token_map"] = arrays.pop("d2t") + np.arange(config.draft_vocab)
    else:
        described = layouts.to_speculators(config, verifier, tokens, "bfloat16" if dtype == "q4_1" else dtype)
    scale = None if isinstance(config, MedusaConfig) else config.decoder.embedding_scale
    own = {
        "format": FORMAT,
        "method": checkpoint.method,
        "head": head,
        "target": dict(checkpoint.target),
        "recipe": dict(checkpoint.recipe),
        **({} if scale is None else {"embedding_scale": scale}),
        **({"quantized": dtype} if dtype == "q4_1" else {}),
        **({"tree": [list(path) for path in config.tree]} if isinstance(config, MedusaConfig) else {}),
    }
    put_files(folder, arrays, described, own, dtype)


def arrays_of(folder: Path, checkpoint: Checkpoint, head: bool) -> dict[str, Any]:
    """The tensors to write, as numpy arrays; without a vocabulary map where the draft's is the target's."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not isinstance(config, MedusaConfig) and list(config.hidden_layers) != sorted(set(config.hidden_layers)):
        raise ModelError(
            f"{folder} cannot be written: the layers {list(config.hidden_layers)} are not ascending, as vLLM has them"
        )
    if isinstance(config, ParallelConfig) and any(config.decoder.windows) and not config.anchored:
        raise ModelError(f"{folder} cannot be written: speculators' layout has no windows that end at a block's slots")
    if not isinstance(config, MedusaConfig) and (d := config.decoder) and (d.gemma or d.conv[0] or d.logit_cap):
        raise ModelError(
            f"{folder} cannot be written: layers of Gemma 4's and of DFlash2's, and capped logits, are read alone"
        )
    wanted = {**tensor_shapes(config), **(head_shapes(config) if head else {})}
    if head:
        wanted |= {name: shape for name, shape in embedding_shape(config).items() if name in tensors}
    if config.draft_vocab < config.vocab:
        wanted["d2t"] = (config.draft_vocab,)
        if not isinstance(config, MedusaConfig):
            wanted["t2d"] = (config.vocab,)
    arrays = {}
    for name, shape in wanted.items():
        if name not in tensors:
            raise ModelError(f"{folder} cannot be written: the drafter has no tensor {name!r}")
        arrays[name] = _numpy(tensors[name])
        if arrays[name].shape != shape:
            found = list(arrays[name].shape)
            raise ModelError(f"{folder} cannot be written: {name} is {found}, but must be {list(shape)}")
    return arrays


def _numpy(values: Any) -> Any:
    """A numpy array, or a torch tensor's numbers as one: numpy has no bfloat16."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy()


def put_files(
    folder: Path, arrays: Mapping[str, Any], described: dict[str, Any], own: dict[str, Any] | None, dtype: str
) -> None:
    """Weights, then config.json with ``own``, our object in it, which gets their checksum (None: without)."""
    if dtype not in DTYPES:
        raise ParameterError(f"a drafter is written as {', '.join(DTYPES)}, not {dtype!r}")
    if dtype == "q4_1":
        arrays = {name: _encoded(values) for name, values in arrays.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{WEIGHTS}.index.json").exists():
        raise ParameterError(f"{folder} holds a model of several files: name a new folder")
    safetensors.write(folder / WEIGHTS, arrays, DTYPES[dtype])
    if own is not None:
        described = {**described, "outpace": {**own, "weights": checksum(folder / WEIGHTS)}}
    write_json(folder / "config.json", described)


def _encoded(values: Any) -> Any:
    """A matrix in Q4_1, whose rows have whole blocks; anything else as it is."""
    matrix = values.dtype.kind == "f" and values.ndim == 2 and values.shape[1] % q4_1.BLOCK == 0
    return q4_1.encode(values) if matrix else values


def checksum(path: Path) -> str:
    """8 hexadecimal digits that tell whether a file of tensors belongs to its config.json. Raises OSError."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def _check_own(own: Facts, folder: Path) -> None:
    if own.get("format") != FORMAT:
        raise own.fail(f"its format is {own.get('format')!r}, and {FORMAT} is read: use the version that wrote it")
    if own.get("head") not in ("target", "own"):
        raise own.fail(f"its head is {own.get('head')!r}, neither 'target' nor 'own': export it again")
    try:
        found = checksum(folder / WEIGHTS)
    except OSError as error:
        raise ModelError(f"{folder / WEIGHTS} cannot be read ({error}): export it again") from error
    if found != own.get("weights"):
        raise ModelError(
            f"{folder / WEIGHTS} is not the file that config.json was written for (checksum {found}, "
            f"not {own.get('weights')}): writing was interrupted, or a file was replaced; export it again"
        )


def _head_needed(own: Facts, config: Config) -> bool:
    """Of other makers, only a drafter of the whole vocabulary may leave its output rows to the target."""
    head = own.get("head")
    return head == "own" if head else config.draft_vocab < config.vocab


def _tensors(
    facts: Facts, config: Config, found: Mapping[str, StoredTensor], head_needed: bool
) -> Mapping[str, _Array]:
    where = Path(facts.name).parent
    needed, heads, embedding = tensor_shapes(config), head_shapes(config), embedding_shape(config)
    has_heads = head_needed or any(name in found for name in heads)
    wanted = {**needed, **(heads if has_heads else {})}
    optional = {**embedding, "d2t": (config.draft_vocab,), "t2d": (config.vocab,), "token_map": (config.draft_vocab,)}
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"{where} has no tensor {name!r}, so the drafter is incomplete: get all of its files")
        if not (name in heads and "token_map" in found and found[name].shape == (config.vocab, shape[1])):
            _shaped(where, name, found[name], shape)
        if found[name].type not in (*safetensors.FLOATS, Q4_1):
            raise ModelError(f"{where}: {name} is of type {found[name].type}: use float32, float16 or bfloat16")
    for name, shape in optional.items():
        if name in found:
            _shaped(where, name, found[name], shape)
    if unknown := sorted(found.keys() - wanted.keys() - optional.keys()):
        raise ModelError(
            f"{where} has the tensor {unknown[0]!r}, which a drafter of its description does not: it would draft "
            "something else without it"
        )
    ids = _target_ids(where, config, found)
    order = np.argsort(ids)  # rows lie in the order of the target's ids: ties go to the lower one
    d2t = ids[order] - np.arange(len(ids), dtype=np.int64)
    t2d = np.zeros(config.vocab, bool)
    t2d[ids] = True
    if "t2d" in found and (safetensors.whole(found["t2d"], "t2d").astype(bool) != t2d).any():
        raise ModelError(f"{where}: t2d does not mark the tokens that d2t leads to: get the files of one download")
    by_token = {*heads, "markov_head.markov_w2.weight"}
    reads: dict[str, Callable[[], _Array]] = {"d2t": lambda: d2t, "t2d": lambda: t2d}
    for name in (*wanted, *(name for name in embedding if name in found)):
        every = found[name].shape[0] > len(ids)  # rows of all of the target's tokens, of which token_map chooses
        shape = {**wanted, **embedding}[name]
        reads[name] = _reader(found[name], name, shape, (ids[order] if every else order) if name in by_token else None)
    return _Lazy(reads)


def _target_ids(where: Path, config: Config, found: Mapping[str, StoredTensor]) -> _Array:
    """The target's id of each draft token, int64 [D], in the file's order."""
    own = np.arange(config.draft_vocab, dtype=np.int64)
    if "token_map" in found:
        ids = safetensors.whole(found["token_map"], "token_map")
    elif "d2t" in found:
        ids = own + safetensors.whole(found["d2t"], "d2t")
    elif config.draft_vocab == config.vocab:
        ids = own
    else:
        name = "token_map" if isinstance(config, MedusaConfig) else "d2t"
        raise ModelError(f"{where} has no tensor {name!r}, so the drafter is incomplete: get all of its files")
    if ids.min() < 0 or ids.max() >= config.vocab or len(np.unique(ids)) < len(ids):
        raise ModelError(
            f"{where}: its draft tokens lead to {ids.min()} to {ids.max()}, not each to a token of its own of the "
            f"target's {config.vocab}: get all of its files again"
        )
    return ids


def _shaped(where: Path, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if _bare(tensor.shape) != _bare(shape):
        raise ModelError(
            f"{where}: {name} is {list(tensor.shape)}, but must be {list(shape)} by config.json: get the files of one "
            "download"
        )


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without dimensions of one that stand first: makers differ in them."""
    return _bare(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _reader(tensor: StoredTensor, name: str, shape: tuple[int, ...], order: _Array | None) -> Callable[[], _Array]:
    def values() -> _Array:
        if tensor.type == Q4_1:
            read = q4_1.decode(tensor.data.reshape(tensor.shape[0], -1))
        else:
            read = safetensors.plain(tensor, name)
        return read.reshape(shape) if order is None else read[order]

    return values


def _object(own: Facts, key: str) -> Mapping[str, Any]:
    own.part(key)
    return dict(own.get(key, {}))


T = TypeVar("T")


class _Lazy(Mapping[str, T]):
    """Values that are made when they are asked for: an embedding of gigabytes that nobody wants is not read."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> T:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers
