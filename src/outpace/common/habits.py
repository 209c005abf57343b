"""Names that vLLM, transformers, llama.cpp, mlx-lm and HTTP APIs have for parameters and options, and what stands for
each here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from outpace.common.parameter import Parameter
from outpace.errors import ParameterError

_GRAMMAR = "rules=[...], with a LogitRule that has mask and forced"
_BEAMS = "nothing: there is no beam search here, only greedy decoding and sampling"
_NO_FILTER = (
    "top_k, top_p, min_p or top_n_sigma: this filter is not offered (a transformers LogitsProcessor in rules=[...] "
    "can do it)"
)
HOMES: Mapping[str, tuple[str, ...]] = {  # who takes which keywords; written by scripts/tables.py
    "Engine.generate_many": (
        "progress",
    ),
    "Engine.generate, generate_many or stream": (
        "errors",
    ),
    "Engine.load": (
        "model", "drafter", "drafters", "tokenizer", "backend", "dtype", "device", "threads", "kv_memory", "kv_dtype",
        "quantize", "strict", "max_length", "chat_template", "revision", "offline", "trust_remote_code",
        "allow_pickle", "size", "acceptance", "max_rows", "prefill_chunk", "prefill_delay", "step_stretch",
        "prefix_rows", "on_step", "cost", "cache_dir", "cache_size",
    ),
    "a request (Engine.generate, stream or add)": (
        "raw", "add_special_tokens", "drafter", "size", "acceptance", "reuse_prefix", "cache_scope", "deadline",
        "priority", "owner", "resume", "verify_resume", "shown_tokens",
    ),
}  # fmt: skip
_REQUEST = "a request (Engine.generate, stream, add, or SamplingParams)"

ELSEWHERE: Mapping[str, str] = {  # names from elsewhere that need more words than a parameter's own aliases
    "max_length": "max_tokens, which counts the answer alone (the whole context: Engine.load(max_length=...))",
    "min_length": "min_tokens, which counts the answer alone",
    "do_sample": "temperature: 0 is greedy, 1 the model's own distribution",
    **dict.fromkeys(("num_beams", "use_beam_search", "beam_width", "length_penalty", "early_stopping"), _BEAMS),
    "penalty_alpha": "nothing: contrastive search is not offered",
    **dict.fromkeys(("repeat_last_n", "penalty_last_n"), "repetition_penalty, which counts the prompt and the output"),
    **dict.fromkeys(("suppress_tokens", "ban_eos_token"), "logit_bias={id: -inf}"),
    "sequence_bias": "logit_bias, for single tokens",
    **dict.fromkeys(("logits_processor", "logits_processors"), "rules=[...], which takes transformers' processors"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"), _GRAMMAR),
    **dict.fromkeys(("structured_outputs", "response_format", "grammar", "json_schema"), _GRAMMAR),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z", "top_a", "epsilon_cutoff", "eta_cutoff"), _NO_FILTER),
    **dict.fromkeys(("mirostat", "mirostat_tau", "dynatemp_range", "xtc_probability", "dry_multiplier"), _NO_FILTER),
    "stream": "Engine.stream",
    "echo": "prompt_logprobs, and the prompt that you have",
    "truncate_prompt_tokens": "nothing: shorten the prompt",
    **dict.fromkeys(("num_speculative_tokens", "num_assistant_tokens"), "Engine.load(size=N)"),
    "prompt_lookup_num_tokens": 'Engine.load(drafter="ngram", size=N)',
    **dict.fromkeys(("assistant_model", "draft_model", "speculative_model"), 'Engine.load(drafter="model:ID")'),
    **dict.fromkeys(("model_path", "model_id", "pretrained_model_name_or_path"), "Engine.load(model), without a name"),
    **dict.fromkeys(("n_ctx", "max_model_len", "max_seq_len", "context_length"), "Engine.load(max_length=N)"),
    **dict.fromkeys(("n_threads", "num_threads", "nthreads"), "Engine.load(threads=N)"),
    "torch_dtype": 'Engine.load(dtype="float32")',
    "device_map": 'Engine.load(device="cuda")',
    "load_in_8bit": 'Engine.load(quantize="int8")',
    **dict.fromkeys(("load_in_4bit", "quantization", "quantization_config"), 'Engine.load(quantize="int4")'),
    "gpu_memory_utilization": 'Engine.load(kv_memory="2GiB")',
    **dict.fromkeys(("max_num_seqs", "max_batch_size", "n_parallel"), "Engine.load(max_rows=N)"),
    "cache_type_k": 'Engine.load(kv_dtype="int8")',
    "local_files_only": "Engine.load(offline=True)",
}


def refusal(name: str, takes: Collection[str], call: str, parameters: Mapping[str, Parameter]) -> ParameterError:
    """The error for the keyword ``name``, which ``call`` does not take: who takes it, what stands for it, or which
    keyword is spelled much like it. ``takes``: what ``call`` does take; ``parameters``: of requests, by name."""
    homes = {own: home for home, names in HOMES.items() for own in names} | dict.fromkeys(parameters, _REQUEST)
    meanings = {own: f"{own}, which {home} takes" for own, home in homes.items()} | {own: own for own in takes}
    meanings |= {alias: meanings[own] for own, parameter in parameters.items() for alias in parameter.names}
    meanings = {**ELSEWHERE, **meanings}
    if name in homes and name not in ELSEWHERE:
        return ParameterError(f"{call} has no {name}: {homes[name]} takes it")
    if name in meanings:
        return ParameterError(f"{call} has no {name}: use {ELSEWHERE.get(name, meanings[name])}")
    close = difflib.get_close_matches(name, takes, 1) or difflib.get_close_matches(name, meanings, 1, 0.75)
    hint = f": did you mean {meanings[close[0]]}?" if close else f": it takes {', '.join(takes)}"
    return ParameterError(f"{call} has no {name}{hint}")


# -- options of llama.cpp's, mlx-lm's and vLLM's command lines --------------------------------------------------------

SAME_OPTIONS: Mapping[str, str] = {  # theirs, which are taken: ours with the same meaning ("prompt" is an argument)
    **dict.fromkeys(("--prompt", "-p"), "prompt"),
    **dict.fromkeys(("--system-prompt", "-sys"), "--system"),
    **dict.fromkeys(("--ignore-chat-template", "--no-conversation", "-no-cnv"), "--raw"),
    **dict.fromkeys(("--n-predict", "--predict", "--max-new-tokens", "--max-completion-tokens"), "--max-tokens"),
    "--temp": "--temperature",
    "--top-nsigma": "--top-n-sigma",
    "--repeat-penalty": "--repetition-penalty",
    **dict.fromkeys(("--json-schema-file", "-jf"), "--json-schema"),
    **dict.fromkeys(("--special", "-sp"), "--keep-special"),
    **dict.fromkeys(("--hf-repo", "-hfr", "-hf"), "--model"),
    **dict.fromkeys(("--ctx-size", "-c", "--max-model-len"), "--max-length"),
    **dict.fromkeys(("--parallel", "-np", "--max-num-seqs"), "--max-rows"),
    "--served-model-name": "--served-name",
    "--chat-template-file": "--chat-template",
    "--num-draft-tokens": "--size",
}

_DRAFT_MODEL = "use --drafter model:PATH, or model:user/repo"
_DRAFT_SIZE = "use --size N, or leave it out: every step then drafts as much as pays"
_DRAFT_END = "leave it out: a draft ends where a token is not expected to pay (--size N fixes its length)"
_DRAFT_METHOD = "use --drafter NAME, one of those at the end of --help, and --size N"
_KV_DTYPE = "use --kv-dtype float32, bfloat16 or int8, which is of keys and values"
_ONE_THREADS = "use --threads N, which is of everything"
_ONE_FORM = "leave it out: there is one way to do it here, the fastest that gives the same bits"
_NO_SUCH_FILTER = "use --top-k, --top-p, --min-p or --top-n-sigma: this one is not offered"
_OWN_TEMPLATE = "leave it out: the model's own are used (--chat-template FILE: another template; --raw: none)"
_WHOLE_MODEL = "use --device cuda, which takes the whole model"
OTHER_OPTIONS: Mapping[str, str] = {  # theirs, of another meaning: what to do instead
    **dict.fromkeys(
        ("--model-draft", "-md", "--spec-draft-model", "--draft-model", "--hf-repo-draft", "-hfd", "-hfrd",
         "--spec-draft-hf", "--speculative-model"), _DRAFT_MODEL),
    **dict.fromkeys(
        ("--draft", "--draft-n", "--draft-max", "--spec-draft-n-max", "--num-speculative-tokens"), _DRAFT_SIZE),
    **dict.fromkeys(
        ("--draft-min", "--draft-n-min", "--spec-draft-n-min", "--draft-p-min", "--spec-draft-p-min"), _DRAFT_END),
    **dict.fromkeys(("--spec-type", "--spec-default", "--speculative-config"), _DRAFT_METHOD),
    **dict.fromkeys(("--cache-type-k", "-ctk", "--cache-type-v", "-ctv", "--kv-cache-dtype", "--kv-bits"), _KV_DTYPE),
    **dict.fromkeys(("--threads-batch", "-tb", "--threads-draft", "-td"), _ONE_THREADS),
    **dict.fromkeys(
        ("--flash-attn", "-fa", "--batch-size", "-b", "--ubatch-size", "-ub", "--mlock", "--mmap", "--no-mmap",
         "--enforce-eager", "--enable-chunked-prefill", "--max-num-batched-tokens"), _ONE_FORM),
    **dict.fromkeys(
        ("--samplers", "--mirostat", "--typical", "--typical-p", "--xtc-probability", "--xtc-threshold",
         "--dry-multiplier", "--dynatemp-range"), _NO_SUCH_FILTER),
    **dict.fromkeys(
        ("--jinja", "--use-default-chat-template", "--tokenizer"),
        _OWN_TEMPLATE),
    **dict.fromkeys(("--gpu-layers", "--n-gpu-layers", "-ngl"), _WHOLE_MODEL),
    **dict.fromkeys(("--file", "-f"), "use standard input: outpace generate < FILE"),
    **dict.fromkeys(("--reverse-prompt", "-r"), "use --stop TEXT, or --include-stop with it to see that text"),
    **dict.fromkeys(("--conversation", "-cnv"), "use outpace chat, which goes on after an answer"),
    **dict.fromkeys(("--single-turn", "-st"), "leave it out: outpace generate answers once"),
    **dict.fromkeys(("--grammar", "--grammar-file"), "use --json-schema FILE or --regex PATTERN"),
    **dict.fromkeys(("--hf-file", "-hff"), "name the file by its quantisation: --model user/repo:Q4_K_M"),
    **dict.fromkeys(("--hf-token", "-hft"), "set HF_TOKEN in the environment"),
    **dict.fromkeys(("--lora", "--adapter-path", "--enable-lora"), "merge the adapter into the model first"),
    "--repeat-last-n": "leave it out: --repetition-penalty X counts the whole prompt and answer",
    "--extra-eos-token": "use --stop-id ID",
    "--max-kv-size": "use --max-length N; an answer ends there, and nothing is overwritten",
    "--gpu-memory-utilization": "use --kv-memory SIZE, such as 8GiB",
    "--quantization": "use --quantize int8 or int4, for weights that are not quantised yet",
    "--enable-prefix-caching": "leave it out: prompts that begin alike share their KV (--prefix-rows 0: they do not)",
    "--no-enable-prefix-caching": "use --prefix-rows 0",
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "use --replicas N, whole models beside one another"),
    "--download-dir": "set HF_HOME in the environment",
    "--api-key": "use --api-key-file FILE, or set OUTPACE_API_KEYS in the environment",
}  # fmt: skip

# -- a model's generation_config.json --------------------------------------------------------------------------------

_NEUTRAL = {  # values at which a setting that we do not have changes nothing
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
}
_NO_MATTER = frozenset(  # about other things than what is sampled, or known from elsewhere
    (
        "do_sample", "transformers_version", "use_cache", "cache_implementation", "cache_config", "return_legacy_cache",
        "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "chat_format", "max_window_size",
        "max_context_size", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
        "return_dict_in_generate", "compile_config", "disable_compile", "prefill_chunk_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "is_assistant", "early_stopping", "trust_remote_code", "renormalize_logits",
        "remove_invalid_values", "low_memory", "target_lookbehind", "assistant_lookbehind", "assistant_early_exit",
    )
)  # fmt: skip


def recommended(source: Any, parameters: Mapping[str, Parameter]) -> tuple[dict[str, Any], list[str]]:
    """``(taken, ignored)``: what a generation_config sets under our names, and its settings that have no name here.

    ``source``: the content, an object with ``to_dict`` (transformers' GenerationConfig), its path, a model's folder, a
    Hugging Face id that is in the local cache, or something with such a ``name`` (a ModelInfo). Only what is written
    there is taken, none of transformers' own defaults: without ``do_sample``, sampling is asked for by a temperature or
    any filter. Raises ParameterError.
    """
    config = _content(source)
    ours = {parameter.config: name for name, parameter in parameters.items() if parameter.config is not None}
    taken = {ours[name]: config[name] for name in ours if config.get(name) is not None}
    sampling = {name for name in taken if parameters[name].stage in ("temperature", "filter")}
    sampled = config.get("do_sample")
    if bool(sampling) if sampled is None else sampled:
        taken.setdefault("temperature", 1.0)
    else:
        taken = {name: value for name, value in taken.items() if name not in sampling}
    if config.get("suppress_tokens"):
        taken["logit_bias"] = {token: float("-inf") for token in config["suppress_tokens"]}
    known = {*ours, *_NO_MATTER, "suppress_tokens"}
    ignored = [
        f"{name}={value!r}"
        for name, value in config.items()
        if name not in known and not name.startswith("_") and value not in (None, False, [], {}, _NEUTRAL.get(name))
    ]
    return taken, ignored


def _content(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if hasattr(source, "to_dict"):
        found = source.to_dict()
        assert isinstance(found, Mapping)
        return found
    path = _path(source)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path} cannot be read ({error}): give a model's folder or generation_config") from error
    if not isinstance(value, dict):
        raise ParameterError(f"{path} is no JSON object: give a model's folder or generation_config")
    return value


def _path(source: Any) -> Path:
    name = source if isinstance(source, (str, PathLike)) else getattr(source, "name", None)
    if not isinstance(name, (str, PathLike)):
        raise ParameterError(f"a {type(source).__name__} has no generation_config: give a model's folder")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ParameterError(f"{name!s}: this machine has no such user: give a model's folder") from error
    if path.is_file():
        if path.suffix != ".json":
            raise ParameterError(f"{path} has no generation_config: give the folder that the model was made from")
        return path
    if path.is_dir():
        if not (path / "generation_config.json").is_file():
            raise ParameterError(f"{path} has no generation_config.json: make SamplingParams(...) of your own")
        return path / "generation_config.json"
    if isinstance(name, str) and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "generation_config.json")
        except HFValidationError:  # no id, so a path that is not there
            cached = None
        if isinstance(cached, str):
            return Path(cached)
    raise ParameterError(
        f"{name} has no generation_config.json on this machine: give a model's folder, or an id that was downloaded"
    )
