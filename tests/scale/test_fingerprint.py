"""Answers of other weights than those before them are refused, whole or streamed, and come from another server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.servers import OURS, started
from tests.scale.conftest import PYTHON


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    with (
        started(f"{OURS} -m demo --drafter ngram", tmp_path / "first.log") as first,
        started(f"{OURS} -m demo-gemma --served-name demo --drafter ngram", tmp_path / "other.log") as other,
    ):
        urls = [each.remote.url for each in (first, other)]
        for streamed in (False, True):
            body = json.dumps({"prompt": "The baker of the village", "seed": 5, "max_tokens": 24, "stream": streamed})
            command = [PYTHON, "-m", "tests.scale.leased", body, *urls]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
            assert found["leased"] == [0, 1, 0]
            begun, again = (_text(answer, streamed) for answer in found["answers"])
            assert begun == again != ""


def _text(answer: str, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(answer)["choices"][0]["text"])
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
