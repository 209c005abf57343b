"""Others' clients, as their own documentation has them, in their own processes: they say what the engine says."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import Engine, SamplingParams
from tests.server.foreign import told
from tests.server.serving import Running

PROMPT = "I love programming."
MESSAGES = [{"role": "user", "content": PROMPT}]
PARAMS = SamplingParams(temperature=0, max_tokens=12)

LANGCHAIN = """
from langchain_openai import ChatOpenAI
llm = ChatOpenAI(model="demo", base_url=BASE, api_key="none", temperature=0, max_tokens=12)
messages = [("human", PROMPT)]
said = [llm.invoke(messages).content, "".join(chunk.content for chunk in llm.stream(messages))]
its = ChatOpenAI(model="demo", base_url=BASE, api_key="none", temperature=0, max_tokens=12, use_responses_api=True)
said.append(its.invoke(messages).text)
"""
LITELLM = """
import litellm
asked = dict(model="openai/demo", messages=[{"role": "user", "content": PROMPT}], api_base=BASE, api_key="none")
asked |= {"temperature": 0, "max_tokens": 12}
said = [litellm.completion(**asked).choices[0].message.content]
said.append("".join(part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)))
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
said = [subprocess.run(its, capture_output=True, text=True, check=True).stdout.removesuffix("\\n") for its in both]
"""


@pytest.mark.parametrize(
    ("package", "script"),
    [("langchain_openai", LANGCHAIN), ("litellm", LITELLM), ("llm", LLM)],
    ids=["langchain", "litellm", "llm"],
)
def test_others_clients(demo: Running, plain: Engine, tmp_path: Path, package: str, script: str) -> None:
    said = told("clients", package, script, demo.url, tmp_path, PROMPT=PROMPT)
    assert said == [plain.generate(MESSAGES, PARAMS).text] * len(said)
    demo.at_rest()
