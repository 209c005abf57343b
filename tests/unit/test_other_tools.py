"""Options that people know from other tools: each is taken, led to what stands for it here, or refused with no guess.

The names are those tools' own: llama.cpp's tools/cli/README.md at commit 0717955, and the speculative ones of its
tools/server/README.md; mlx-lm's mlx_lm/generate.py at commit 0024613; the engine and server arguments of vLLM's docs.
"""

from __future__ import annotations

import re
from functools import wraps

import pytest

from outpace.cli import app, generate
from outpace.cli.command import Command, UsageError
from outpace.common.habits import OTHER_OPTIONS, SAME_OPTIONS
from outpace.errors import ParameterError


def words(text: str) -> list[str]:
    return text.split()


LLAMA_CPP = words("""
-t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -c --ctx-size -n --predict
--n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -fa --flash-attn -p --prompt --perf --no-perf -f --file
-bf --binary-file -e --escape --no-escape --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale
--yarn-orig-ctx -kvo --kv-offload -nkvo --no-kv-offload --repack -nr --no-repack --no-host -ctk --cache-type-k -ctv
--cache-type-v -np --parallel --rpc --mlock --mmap --no-mmap -dio --direct-io -lm --load-mode --numa -dev --device
--list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ngl --gpu-layers --n-gpu-layers -sm
--split-mode -ts --tensor-split -mg --main-gpu -fit --fit --check-tensors --override-kv --op-offload --lora
--lora-scaled --control-vector -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft
--hf-token --log-disable --log-file --log-colors -v --verbose --offline -lv --verbosity --log-prefix --log-timestamps
-ctkd --cache-type-k-draft --samplers -s --seed --sampler-seq --ignore-eos --temp --temperature --top-k --top-p --min-p
--top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n --repeat-penalty
--presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n
--dry-sequence-breaker --adaptive-target --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l
--logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file -bs --backend-sampling --verbose-prompt
--display-prompt --no-display-prompt -co --color -cram --cache-ram --context-shift --no-context-shift -sys
--system-prompt --show-timings -sysf --system-prompt-file -r --reverse-prompt -sp --special -cnv --conversation
-no-cnv --no-conversation -st --single-turn -mli --multiline-input --warmup -mm --mmproj --image -o --output
--chat-template-kwargs --jinja --no-jinja --reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget
--chat-template --chat-template-file --simple-io -hfd -hfrd --hf-repo-draft --spec-draft-hf -td --threads-draft -md
--model-draft --spec-draft-model --spec-draft-n-max --spec-draft-n-min --spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min -devd --device-draft -ngld --gpu-layers-draft --spec-type --spec-ngram-mod-n-min
--spec-ngram-mod-n-max --spec-ngram-simple-size-n --draft --draft-n --draft-max --draft-min --draft-n-min
--spec-default -a --alias --host --port --api-key --api-key-file
""")
MLX_LM = words("""
--model --trust-remote-code --adapter-path --extra-eos-token --system-prompt --prompt -p --prefill-response
--max-tokens -m --temp --top-p --min-p --top-k --xtc-probability --xtc-threshold --min-tokens-to-keep --seed
--ignore-chat-template --use-default-chat-template --chat-template-config --verbose --max-kv-size --prompt-cache-file
--quantize-activations -qa --kv-bits --kv-group-size --quantized-kv-start --draft-model --num-draft-tokens
""")
VLLM = words("""
--model --tokenizer --revision --trust-remote-code --download-dir --dtype --kv-cache-dtype --max-model-len
--tensor-parallel-size -tp --pipeline-parallel-size --block-size --enable-prefix-caching --no-enable-prefix-caching
--seed --swap-space --cpu-offload-gb --gpu-memory-utilization --max-num-batched-tokens --max-num-seqs --max-logprobs
--quantization --enforce-eager --enable-chunked-prefill --speculative-config --speculative-model
--num-speculative-tokens --served-model-name --enable-lora --host --port --api-key --chat-template
""")
TRANSFORMERS = ["--max-new-tokens", "--max-completion-tokens"]  # of generate, and of OpenAI's API

WORTH_KNOWING = words("""
--temp --prompt -p --n-predict --predict --max-new-tokens -c --ctx-size --max-model-len -md --model-draft --draft-model
--draft-max --draft-n --draft --spec-draft-n-max --spec-type --speculative-config --num-draft-tokens --system-prompt
-sys --repeat-penalty --top-nsigma -ngl --n-gpu-layers -fa --flash-attn -np --parallel --max-num-seqs -ctk
--kv-cache-dtype --kv-bits --max-kv-size --gpu-memory-utilization --tensor-parallel-size --quantization --api-key
--served-model-name --alias -f --file -r --reverse-prompt -no-cnv --ignore-chat-template --grammar --mirostat
--xtc-probability --typical --jinja --chat-template -hf --hf-repo --lora --adapter-path
""")


def answer(name: str, *command: str) -> str:
    """What a person reads who gives the option to a command: nothing where it is taken."""
    for given in ([name, "1"], [name]):  # some stand alone
        try:
            app.parse([*command, *given])
        except UsageError as error:
            said = str(error)
        except ParameterError:  # it is taken, and 1 is none of its values
            return ""
        else:
            return ""
    return said


def test_the_names_are_those_of_other_tools() -> None:
    assert not SAME_OPTIONS.keys() & OTHER_OPTIONS.keys()
    assert SAME_OPTIONS.keys() | OTHER_OPTIONS.keys() <= {*LLAMA_CPP, *MLX_LM, *VLLM, *TRANSFORMERS}


@pytest.mark.parametrize("name", WORTH_KNOWING)
def test_what_people_type_is_taken_or_led_to_what_there_is(name: str) -> None:
    for command in ("generate", "serve"):
        said = answer(name, command)
        if not said or re.fullmatch(rf"there is no option {name}: (use|leave it out|name|set|merge) .*", said) or (
            said.startswith(f"there is no option {name}: leave it out:")
        ):  # fmt: skip
            return
    pytest.fail(said)


@pytest.mark.parametrize("name", sorted({*LLAMA_CPP, *MLX_LM, *VLLM}))
def test_no_name_of_other_tools_is_led_astray(name: str) -> None:
    """What looks like one of ours by its letters alone is not suggested."""
    said = answer(name, "generate")
    assert "did you mean" not in said or name == "--verbosity", said


def test_a_hint_names_options_that_there_are() -> None:
    ours = {name for command in ("generate", "serve") for name in names(command)} | {"prompt"}
    for theirs, hint in OTHER_OPTIONS.items():
        assert set(re.findall(r"--[a-z][a-z-]+", hint)) <= ours, theirs
    assert set(SAME_OPTIONS.values()) <= ours


def names(command: str) -> list[str]:
    entry = app.command(command)
    assert isinstance(entry, Command)
    return [name for each in entry.options() for name in each.option or ()] + ["--help"]


def test_options_that_are_taken_mean_the_same() -> None:
    seen: list[dict[str, object]] = []

    @wraps(generate.run)
    def run(**given: object) -> int:
        seen.append(given)
        return 0

    for theirs, ours in (
        ("-p hi --temp 0.5 -n -1 --top-nsigma 1 --repeat-penalty 1.1 -c 512 -sys x -hf a/b:Q4_K_M",
         "hi -T 0.5 -n none --top-n-sigma 1 --repetition-penalty 1.1 --max-length 512 --system x -m a/b:Q4_K_M"),
        ("--prompt=hi --ignore-chat-template --num-draft-tokens 4", "hi --raw --size 4"),
        ("--max-model-len=512 hi --max-new-tokens=9", "--max-length 512 -n 9 hi"),
    ):  # fmt: skip
        for line in (theirs, ours):
            Command("generate", run, "").parse("outpace", line.split())()
        assert seen[-1] == seen[-2]
        assert seen[-1]["prompt"] == "hi"
