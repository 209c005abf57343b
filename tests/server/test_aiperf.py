"""AIPerf counts the drafts that the engine counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace import Engine
from tests.server.foreign import results_of
from tests.server.serving import Running

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
