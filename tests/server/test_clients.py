"""Others' clients, as their own documentation has them, in their own processes: they say what the engine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import Engine, SamplingParams
from tests.server.foreign import results_of
from tests.server.serving import Running

PROMPT = "I love programming."
MESSAGES = [{"role": "user", "content": PROMPT}]
PARAMS = SamplingParams(temperature=0, max_tokens=12)

LANGCHAIN = """
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(model="demo", base_url=BASE, api_key="none", temperature=0, max_tokens=12)
messages = [("human", PROMPT)]
found = [llm.invoke(messages).content, "".join(chunk.content for chunk in llm.stream(messages))]
its = ChatOpenAI(model="demo", base_url=BASE, api_key="none", temperature=0, max_tokens=12, use_responses_api=True)
found.append(its.invoke(messages).text)
"""
LITELLM = """
import litellm
asked = dict(model="openai/demo", messages=[{"role": "user", "content": PROMPT}], api_base=BASE, api_key="none")
asked |= {"temperature": 0, "max_tokens": 12}
found = [litellm.completion(**asked).choices[0].message.content]
found.append("".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)))
"""
LLM = """
import pathlib, os, subprocess, sys
home = pathlib.Path(os.environ["LLM_USER_PATH"])
home.mkdir(exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f'- model_id: outpace\\n  model_name: demo\\n  api_base: "{BASE}"\\n', encoding="utf-8"
)
command = [sys.executable, "-m", "llm", "-m", "outpace", PROMPT, "-o", "temperature", "0", "-o", "max_tokens", "12"]
both = [command, [*command, "--no-stream"]]
found = [subprocess.run(its, capture_output=True, text=True, check=True).stdout.removesuffix("\\n") for its in both]
"""
AIPERF = """
import pathlib, subprocess, sys
pathlib.Path("prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\\n" for text in PROMPTS))
extra = {"max_tokens": 32, "temperature": 0, "ignore_eos": True, "speculation": {"size": 3}}
command = [sys.executable, "-m", "aiperf", "profile", "--model", "demo", "--url", URL, "--streaming", "--ui", "none"]
command += ["--endpoint-type", KIND, "--use-server-token-count", "--tokenizer", TOKENIZER, "--concurrency", "2"]
command += ["--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn", "--request-count", "4"]
subprocess.run([*command, "--extra-inputs", json.dumps(extra), "--artifact-dir", "out"], check=True, stdout=2)
found = json.loads(pathlib.Path("out/profile_export_aiperf.json").read_text())
"""


@pytest.mark.parametrize(
    ("package", "script"),
    [("langchain_openai", LANGCHAIN), ("litellm", LITELLM), ("llm", LLM)],
    ids=["langchain", "litellm", "llm"],
)
def test_others_clients(demo: Running, plain: Engine, tmp_path: Path, package: str, script: str) -> None:
    found = results_of("clients", package, script, demo.url, tmp_path, PROMPT=PROMPT)
    assert found == [plain.generate(MESSAGES, PARAMS).text] * len(found)
    demo.at_rest()


def drafts(demo: Running) -> tuple[int, int]:
    """Drafted and accepted tokens, as the engine counts them."""
    demo.at_rest()
    stats = demo.call(demo.engine.stats())
    return stats.drafted, stats.accepted


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_measures_drafts(demo: Running, plain: Engine, tmp_path: Path, kind: str) -> None:
    assert plain.tokenizer is not None
    own = tmp_path / "tokenizer"
    own.mkdir()
    plain.tokenizer.save(own)
    before = drafts(demo)
    texts = [f"Repeat: {word} one two, {word} one two, {word} one two, {word}" for word in ("a", "the", "that", "as")]
    found = results_of("aiperf", "aiperf", AIPERF, demo.url, tmp_path, PROMPTS=texts, KIND=kind, TOKENIZER=str(own))
    assert found["request_count"]["avg"] == 4
    assert found["error_summary"] == []
    assert found["total_usage_completion_tokens"]["avg"] == 4 * 32
    totals = (found["total_draft_tokens"]["avg"], found["total_accepted_draft_tokens"]["avg"])
    assert totals == tuple(after - b for after, b in zip(drafts(demo), before, strict=True))
    assert found["spec_decode_overall_draft_acceptance_rate"]["avg"] == pytest.approx(100 * totals[1] / totals[0])
    histogram = found["pooled_spec_decode_acceptance_histogram"].items()
    assert sum(int(accepted) * steps for accepted, steps in histogram) == totals[1] > 0
