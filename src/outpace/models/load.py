"""From a name on the command line to a model and its tokenizer."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outpace.common.files import StrPath, cache_dir, expanded
from outpace.common.installing import install
from outpace.common.progress import progress
from outpace.errors import Argument, ModelError, ParameterError
from outpace.models import decoder as decoders
from outpace.models import demo, families
from outpace.models.architecture import ATTENDING, Family
from outpace.models.options import LoadOptions
from outpace.models.refused import RECURRENT_LAYERS, refuse_images, refuse_misspelt, refuse_recurrent
from outpace.models.weights import safetensors, tensors
from outpace.models.weights.facts import read_config
from outpace.models.weights.file_bytes import refuse_pointer
from outpace.models.weights.gguf import GGUFFile, is_gguf
from outpace.models.weights.hub import from_hub, from_name, is_name, without_hub
from outpace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from outpace.models.base import Model

_READ = (".json", ".safetensors", ".model", ".bin", ".txt", ".jinja")  # endings of a folder's files that are read
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
TORCH_PACKAGES = ("torch", "transformers", "safetensors")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where a model lies: a GGUF file or a Hugging Face folder."""

    name: str  # as the user wrote it
    kind: Literal["gguf", "folder"]
    path: Path

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The file's header, read once: a vocabulary's strings take a tenth of a second. None: a folder."""
        return GGUFFile.open(self.path) if self.kind == "gguf" else None


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the weights as loaded, and of one position of KV, both on ``device`` ("cpu", "cuda:1"). ``windowed`` of
    those of a position are kept for a row's last ``window`` positions alone, by layers that see no more."""

    weights: int
    kv_bytes_per_position: int
    device: str = "cpu"
    windowed: int = 0
    window: int = 0


def resolve(spec: StrPath, options: LoadOptions | None = None) -> Source:
    """Find ``spec``: demo, demo-draft, demo-gemma, a .gguf file, a folder, a Hugging Face id, or a GGUF file in such a
    repository, by its quantisation ("user/repo:Q4_K_M"); what is not cached is downloaded. An ``os.PathLike`` is a file
    or folder.

    Raises ModelError with the remedy when it cannot be found.
    """
    options = options or LoadOptions()
    if isinstance(spec, os.PathLike):
        if (there := _at(os.fspath(spec))) is None:
            raise ModelError(f"{spec} does not exist: check the path, or give a model's name as text")
        return there
    if not spec:
        raise ModelError(
            "the model's name is empty: give demo, a folder, a .gguf file, a Hugging Face id or user/repo:Q4_K_M"
        )
    if spec == "demo":
        return Source(spec, "gguf", demo.smollm2())
    if spec == "demo-draft":
        return Source(spec, "gguf", demo.draft())
    if spec == "demo-gemma":
        return Source(spec, "gguf", demo.gemma(cache_dir()))
    if (there := _at(spec)) is not None:
        return there
    spec = without_hub(spec)
    path = expanded(spec)
    if options.revision is None and ":" not in spec:
        refuse_misspelt(spec)
    if is_name(spec):
        path = from_name(spec, revision=options.revision, offline=options.offline, progress=progress)
        return Source(spec, "gguf", path)
    if path.suffix.lower() == ".gguf" or spec.startswith(("/", ".", "~")) or spec.count("/") > 1 or "\\" in spec:
        raise ModelError(f"{spec} does not exist: check the path, or use ", Argument("model", "demo"))
    return Source(
        spec,
        "folder",
        from_hub(spec, revision=options.revision, allow_pickle=options.allow_pickle, offline=options.offline),
    )


def published_name(spec: str) -> str:
    """What others call the model that ``spec`` names: without the path of a folder or a file, without a file's ending
    and a shard's number; ``general.name`` of a GGUF file that has no ending. Raises ModelError."""
    path = expanded(spec)
    if path.is_dir():
        return path.resolve().name or spec
    if not path.is_file():
        return spec
    if path.suffix:
        return _SHARD.sub("", path.stem)
    return GGUFFile.open(path).text("general.name", path.name)


def _at(spec: str) -> Source | None:
    """The model that lies at the path ``spec``; None where nothing does. Raises ModelError for what is no model."""
    path = expanded(spec)
    if path.is_dir():
        if not (path / "config.json").is_file():
            refuse_images(spec, path, None)
            raise ModelError(f"{spec} has no config.json: give a Hugging Face model folder or a .gguf file")
        for file in path.iterdir():
            if file.is_file() and file.suffix in _READ:
                refuse_pointer(file, file.stat().st_size)
        return Source(spec, "folder", path)
    if path.is_file():
        refuse_pointer(path, path.stat().st_size)
        if not is_gguf(path):
            raise ModelError(f"{spec} is not a GGUF file: give a Hugging Face model folder or a .gguf file")
        return Source(spec, "gguf", path)
    return None


def load(
    spec: StrPath | Source, options: LoadOptions | None = None, *, beside: Model | None = None
) -> tuple[Model, Tokenizer]:
    """The model and its tokenizer, ready to serve; ``spec`` as ``resolve`` takes it, or what it returned.

    ``beside``: a model with which it computes in turn: where both are native, they share threads and working memory.
    Raises ModelError when it cannot be found, read or served exactly; MemoryError is reported as one, too.
    """
    options = options or LoadOptions()
    source = spec if isinstance(spec, Source) else resolve(spec, options)
    gguf = source.gguf
    backend = _backend_for(source, gguf, options)
    if gguf is None and families.text_part(read_config(source.path)) is not None:
        log.warning("%s also reads images, which are not decoded here: its part for text is served", source.name)
    if backend == "native":
        return _load_native(source, gguf, options, beside)
    if options.quantize is not None:
        raise ParameterError(Argument("quantize"), f" needs the native backend, which does not serve {source.name}")
    if gguf is not None:
        return _load_gguf(source, gguf, options)
    tokenizer = Tokenizer.from_folder(source.path, trust_remote_code=options.trust_remote_code)
    with _readable(source):
        return _served(_folder_module(source, options), source.name, tokenizer.eos_ids, options), tokenizer


def live(
    module: Any,
    tokenizer: Any = None,
    options: LoadOptions | None = None,
    *,
    weak: bool = False,
    beside: Model | None = None,
) -> tuple[Model, Tokenizer | None]:
    """The model and the tokenizer for transformers objects in memory: a PreTrainedModel in evaluation mode, which stays
    the caller's, and a PreTrainedTokenizer or its folder (None: prompts are token ids).

    ``weak``: it is neither kept alive nor watched for changes, and the native backend computes it where it can, beside
    a model (``beside``) with which it computes in turn.

    Raises ModelError when the model cannot be served exactly; ParameterError for options that say how to load weights.
    """
    options = options or LoadOptions()
    for name in ("dtype", "device", "quantize", "revision", "kv_dtype", "threads"):
        if getattr(options, name) != LoadOptions.__dataclass_fields__[name].default:
            raise ParameterError(Argument(name, getattr(options, name)), " says how to load, but this model is loaded")
    module = unwrapped(module)
    if not hasattr(module, "get_output_embeddings"):
        models = "a name, a folder, a .gguf file, or a transformers PreTrainedModel"
        raise ModelError(f"a {type(module).__name__} is no model: give {models}")
    if options.backend == "native":
        raise ParameterError(
            Argument("backend", "native"),
            " is for a model in files: for one in memory use ",
            Argument("backend", "transformers"),
        )
    if module.get_output_embeddings() is None and not module.can_generate():
        raise ModelError(
            f"a {type(module).__name__} generates no text: load the checkpoint with AutoModelForCausalLM, which has "
            f"the head for it"
        )
    if any(part.training for part in module.modules()):
        raise ModelError(
            f"this {type(module).__name__} is in training mode, where dropout is on: call its eval() first"
        )
    own: Tokenizer | None = None
    if isinstance(tokenizer, (str, os.PathLike)):
        own = Tokenizer.from_folder(tokenizer, trust_remote_code=options.trust_remote_code)
    elif hasattr(tokenizer, "save_pretrained"):
        own = Tokenizer.from_transformers(tokenizer, module.generation_config)
    elif tokenizer is not None:
        raise ParameterError(
            f"a {type(tokenizer).__name__} is no tokenizer: give a transformers PreTrainedTokenizer or its folder"
        )
    name = getattr(module.config, "_name_or_path", "") or type(module).__name__
    ends = () if own is None else own.eos_ids
    if weak:
        from outpace.models.torch.native import packed

        runtime = None if beside is None else beside.runtime
        try:
            return packed(module, name, options.max_length, options.kv_memory, runtime), own
        except ModelError as error:
            log.info("%s; transformers' modules or our forward of them compute", error)
    return _served(module, name, ends, options, weak=weak, watched=not weak), own


def unwrapped(module: Any) -> Any:
    """The transformers model within what torch.compile, DataParallel or peft put around it."""
    while True:
        children = getattr(module, "_modules", {})
        inner = children.get("_orig_mod", children.get("module"))
        if hasattr(module, "get_base_model"):
            inner = module.get_base_model()
        if inner is None or inner is module:
            return module
        module = inner


def estimate(spec: StrPath | Source, options: LoadOptions | None = None) -> MemoryEstimate:
    """What loading ``spec`` would take, from headers alone. Raises ModelError."""
    options = options or LoadOptions()
    source = spec if isinstance(spec, Source) else resolve(spec, options)
    gguf = source.gguf
    if _backend_for(source, gguf, options, explain=False) == "native":
        from outpace.models.native import build

        given = {name: getattr(options, name) for name in ("quantize", "dtype", "kv_dtype")}
        weights, position, windowed, window = build.estimate(gguf or source.path, **given)
        return MemoryEstimate(weights, position, windowed=windowed, window=window)
    if gguf is not None:
        per_position = _gguf_reader(gguf).kv_numbers(gguf)
        size = _dtype_bytes(options, 2)
        elements = sum(t.elements for t in gguf.tensors.values())
        return MemoryEstimate(elements * size, per_position * size, _device_name(options))
    with _readable(source):
        return _estimate_folder(source, options)


def _backend_for(source: Source, gguf: GGUFFile | None, options: LoadOptions, explain: bool = True) -> str:
    """Which backend serves ``source``; under auto, a reason for not taking the native one is logged (``explain``).

    Raises ModelError when the native one is asked for and cannot serve it.
    """
    if options.backend == "transformers":
        _refuse_for_all(source, gguf)
        need_torch(source.name)
        return "transformers"
    from outpace.models.native import build

    try:
        if options.device not in ("auto", "cpu"):
            raise ModelError("the native backend does not run on ", Argument("device", options.device))
        if gguf is None and not list(source.path.glob("*.safetensors")):
            raise ModelError(f"{source.name} has no safetensors weights")
        build.estimate(gguf or source.path, quantize=options.quantize, dtype=options.dtype)  # whatever it refuses
    except ModelError as error:
        _refuse_for_all(source, gguf, error)
        if options.backend == "native":
            raise ModelError(error, ": ", *_instead(source, gguf, options, error)) from error
        need_torch(source.name, error)
        if explain:
            log.info("%s; using transformers", error)
        return "transformers"
    if not _recurs(source, gguf) and options.backend == "auto" and options.device == "auto" and _gpu():
        if explain:
            log.info("this machine has a GPU; using transformers (the native backend runs on the CPU)")
        return "transformers"
    return "native"


def _instead(
    source: Source, gguf: GGUFFile | None, options: LoadOptions, error: ModelError
) -> tuple[str | Argument, ...]:
    """What to do about an option that keeps the native backend from a model; where none does: the other backend.
    Raises ModelError where that is not installed."""
    for name, usual in (("dtype", replace(options, dtype="auto")), ("device", replace(options, device="auto"))):
        if usual != options:
            with suppress(ModelError):
                _backend_for(source, gguf, usual)
                return "leave out ", Argument(name, getattr(options, name))
    need_torch(source.name, error)
    return "use ", Argument("backend", "transformers")


def _refuse_for_all(source: Source, gguf: GGUFFile | None, error: ModelError | None = None) -> None:
    """Raise ModelError for what headers show that no backend serves. ``error``: why the native one does not."""
    architecture = None if gguf is None else gguf.architecture
    recurrent = _recurs(source, gguf)
    if recurrent and gguf is not None:
        if error is not None:
            raise error
        what = "recurrent layers, which the native backend alone reads from GGUF files"
        other = ", or give the folder that the file was made from"
        raise ModelError(f"{source.name} has {what}: use ", Argument("backend", "native"), other)
    refuse_images(source.name, source.path, architecture)
    if not recurrent:
        refuse_recurrent(source.name, source.path, architecture)
    if gguf is None:
        if list(source.path.glob("*.safetensors")):
            safetensors.read_folder(source.path)  # damaged and missing files
    elif _own_family(gguf):
        decoder = decoders.from_gguf(gguf, "cannot be served")
        if error is not None and tensors.of_gguf(gguf, decoder).unused():
            raise error
    elif all(map(find_spec, TORCH_PACKAGES)):
        _gguf_reader(gguf).kv_numbers(gguf)


def _family(source: Source, gguf: GGUFFile | None) -> Family | None:
    """The family of a file or folder, if it is known."""
    if gguf is not None:
        return _file_family(gguf)
    config = read_config(source.path)
    return families.of_class(str(families.named_class(families.text_part(config) or config)))


def _recurs(source: Source, gguf: GGUFFile | None) -> bool:
    """Whether it is of a family here that has recurrent layers, and has some."""
    family = _family(source, gguf)
    if family is None or family.scan is None or gguf is not None:
        return family is not None and family.recurrent is not None
    config = read_config(source.path)
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    return any(kind not in ATTENDING for kind in kinds)


def _file_family(gguf: GGUFFile) -> Family | None:
    return families.of_gguf(gguf.architecture, mixed=bool(gguf.metadata.get(f"{gguf.architecture}.expert_count")))


def need_torch(name: str, why: ModelError | None = None) -> None:
    """Raise ModelError where the Transformers backend was not installed. ``why``: the native one does not do."""
    if any(find_spec(package) is None for package in TORCH_PACKAGES):
        reason = () if why is None else (why, ", and ")
        raise ModelError(
            *reason,
            f"the Transformers backend, which knows other models, is not installed: {install('outpace[torch]')}",
        )


def _gpu() -> bool:
    """Whether torch could use a GPU; torch is asked only where a driver is loaded."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        return False
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _load_native(
    source: Source, gguf: GGUFFile | None, options: LoadOptions, beside: Model | None
) -> tuple[Model, Tokenizer]:
    from outpace.models.native.model import load_native

    runtime = None if beside is None else beside.runtime
    if gguf is not None:
        tokenizer = Tokenizer.from_gguf(gguf)
    else:
        tokenizer = Tokenizer.from_folder(source.path, trust_remote_code=options.trust_remote_code)
    model = load_native(
        source.path if gguf is None else gguf,
        name=source.name,
        eos_ids=tokenizer.eos_ids,
        threads=None if runtime is not None else options.threads,
        kv_memory=options.kv_memory,
        kv_dtype=options.kv_dtype,
        max_length=options.max_length,
        quantize=options.quantize,
        dtype=options.dtype,
        runtime=runtime,
    )
    return model, tokenizer


def _gguf_reader(gguf: GGUFFile) -> Any:
    """The module that turns the file into a transformers model: ours where it knows the family."""
    from outpace.models.torch import gguf as own
    from outpace.models.torch import gguf_others

    return own if _own_family(gguf) else gguf_others


def _own_family(gguf: GGUFFile) -> bool:
    """Whether ours is the reader of a file for the Transformers backend: of dense models of known families."""
    family = _file_family(gguf)
    return family is not None and family.mixture is None and not family.modules


def _load_gguf(source: Source, gguf: GGUFFile, options: LoadOptions) -> tuple[Model, Tokenizer]:
    reader = _gguf_reader(gguf)
    reader.kv_numbers(gguf)  # refuses what cannot be served before anything is read
    tokenizer = Tokenizer.from_gguf(gguf)
    torch = _torch(options)
    device = _device(torch, options)
    dtype = getattr(torch, "bfloat16" if options.dtype == "auto" else options.dtype)
    if options.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    with _readable(source):
        module = reader.build(gguf, dtype, device).requires_grad_(False)
        return _served(module, source.name, tokenizer.eos_ids, options), tokenizer


def _folder_module(source: Source, options: LoadOptions) -> Any:
    torch = _torch(options)
    device = _device(torch, options)
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = {"trust_remote_code": options.trust_remote_code, "local_files_only": True}
    text, more = families.text_part(read_config(source.path)), dict[str, Any]()
    if text is None:
        config = AutoConfig.from_pretrained(str(source.path), **trust)
    else:
        config = AutoConfig.for_model(**text)
        more["key_mapping"] = {f"^{re.escape(theirs)}": own for theirs, own in families.TEXT_TENSORS}
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{source.name} cannot be served exactly: it is an encoder-decoder model")
    if not options.allow_pickle and not list(source.path.glob("*.safetensors")):
        raise ModelError(
            f"{source.name} has no safetensors weights, and other formats can run code: use ",
            Argument("allow_pickle", True),
            " if you trust it",
        )
    dtype: Any = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    if device.type != "cpu" and find_spec("accelerate"):  # each tensor goes from its file to the device, one at a time
        more["device_map"] = {"": device}
    with _quietly(text is not None):
        module, found = AutoModelForCausalLM.from_pretrained(
            str(source.path),
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=None if options.allow_pickle else True,
            output_loading_info=True,
            **more,
            **trust,
        )
    if missing := sorted(found["missing_keys"]):  # transformers would draw them at random
        raise ModelError(
            f"{source.name} has no tensor {missing[0]!r}, so the model is incomplete: get all of its files"
        )
    return module.to(device).requires_grad_(False).eval()


@contextmanager
def _quietly(quiet: bool) -> Iterator[None]:
    """Without transformers' list of tensors that were left out, where these are of images."""
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    if quiet:
        theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(before)


def _served(module: Any, name: str, eos_ids: tuple[int, ...], options: LoadOptions, **lifetime: bool) -> Model:
    from outpace.models.torch.model import TransformersModel

    return TransformersModel(
        module,
        name=name,
        eos_ids=eos_ids,
        longest=options.max_length,
        kv_memory=options.kv_memory,
        strict=options.strict,
        warn=log.warning,
        **lifetime,
    )


def _torch(options: LoadOptions) -> Any:
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return torch


def _device(torch: Any, options: LoadOptions) -> Any:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch_device(
        torch, options.device, "use auto, cpu or cuda" if torch.cuda.is_available() else "use auto or cpu"
    )


def torch_device(torch: Any, name: str, remedy: str) -> Any:
    """A device that torch can use. Raises ParameterError with the ``remedy``."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ParameterError(Argument("device", name), f" cannot be used ({reason}): {remedy}") from error
    return device


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    """Turns what transformers and torch raise about unusable files into one line."""
    try:
        yield
    except (ModelError, ParameterError):
        raise
    except MemoryError as error:
        smaller = Argument("dtype", "bfloat16")
        raise ModelError(f"{source.name} does not fit into memory: use a smaller model or ", smaller) from error
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{source.name} cannot be loaded: {lines[0]}") from error


def _estimate_folder(source: Source, options: LoadOptions) -> MemoryEstimate:
    config: dict[str, Any] = {}
    try:
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{source.path / 'config.json'} cannot be read ({error}): download it again") from error
    text = config.get("text_config") or config
    elements = _elements(source.path)
    size = _dtype_bytes(options, 2 if "16" in str(text.get("dtype") or text.get("torch_dtype")) else 4)
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    hidden = text.get("hidden_size") or text.get("n_embd") or 0
    width = text.get("head_dim") or hidden // heads
    listed = text.get("layer_types")
    kinds = [str(kind) for kind in listed] if isinstance(listed, list) else []
    layers = (text.get("num_hidden_layers") or text.get("n_layer") or 0) - sum(k in RECURRENT_LAYERS for k in kinds)
    per_position = 2 * layers * (text.get("num_key_value_heads") or heads) * width * size
    return MemoryEstimate(elements * size, per_position, _device_name(options))


def _elements(folder: Path) -> int:
    """Numbers in a folder's safetensors files, from their headers; other weights by size, taken as 16-bit."""
    total = 0
    for path in folder.glob("*.safetensors"):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "np") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read ({error}): download it again") from error
    return total or sum(path.stat().st_size // 2 for path in folder.glob("*.bin"))


def _device_name(options: LoadOptions) -> str:
    """Where the Transformers backend would put a model."""
    if options.device == "cpu":
        return "cpu"
    import torch

    return str(_device(torch, options))


def _dtype_bytes(options: LoadOptions, checkpoint: int) -> int:
    """Bytes of a number once loaded: auto is float32 on a CPU, what the checkpoint has elsewhere."""
    if options.dtype == "auto":
        import torch

        return 4 if _device(torch, options).type == "cpu" else checkpoint
    return 4 if options.dtype == "float32" else 2
