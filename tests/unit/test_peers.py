"""The comparison with other engines: its arithmetic, and the requantised file. Needs none of the engines."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.peers import report
from benchmarks.peers.requantise import requantise


def rows(
    config: str, rests: list[float], texts: list[str], tokens: int = 11, first_tokens: int = 1
) -> list[report.Row]:
    same = {"config": config, "tokens": tokens, "first_tokens": first_tokens, "first": 0.5}
    return [{**same, "prompt": str(i), "rest": r, "text": t} for i, (r, t) in enumerate(zip(rests, texts, strict=True))]


def test_figures_are_pooled_and_changes_are_counted_against_the_same_engine() -> None:
    answers = [
        *rows("llamacpp-q4_1 plain", [1.0, 1.0], ["a", "b"]),
        *rows("openvino paged", [0.5, 0.5], ["c", "d"]),
        *rows("openvino lookup-5", [0.2, 0.6], ["c", "x"]),
        *rows("outpace none", [0.4, 0.4], ["e", "f"]),
        *rows("outpace ngram", [0.1, 0.3], ["e", "f"], first_tokens=3),
    ]
    plain = {"openvino paged": "openvino paged", "openvino lookup-5": "openvino paged"}
    plain |= dict.fromkeys(("outpace none", "outpace ngram"), "outpace none")
    plain["llamacpp-q4_1 plain"] = "llamacpp-q4_1 plain"
    found = {row["config"]: row for row in report.table(answers, plain)}
    assert found["openvino lookup-5"]["decode_tokens_per_second"] == pytest.approx(20 / 0.8)
    assert found["openvino lookup-5"]["changed"] == 1
    assert found["outpace ngram"]["decode_tokens_per_second"] == pytest.approx(16 / 0.4)
    assert found["outpace ngram"]["of_best_peer"] == pytest.approx(40 / 25)
    assert found["outpace ngram"]["changed"] == 0
    prefills = report.prefill([{"config": "outpace none", "prompt_tokens": 1000, "first": s} for s in (0.4, 0.5, 9.0)])
    assert prefills == {"outpace none": 2000.0}
    ratios = report.summary(list(found.values()), {**prefills, "llamacpp-q4_1 plain": 400.0})
    middle = report.medians(answers, list(found.values()))
    assert middle["plain over llamacpp-q4_1 plain"] == pytest.approx(2.5)
    assert middle["outpace ngram over openvino lookup-5"] == pytest.approx((80 / 50 + 80 / 3 / (10 / 0.6)) / 2)
    assert ratios["plain over llama.cpp Q4_1 plain"] == pytest.approx(2.5)
    assert ratios["ngram over the best peer"] == ratios["best over the best peer"] == pytest.approx(1.6)
    assert ratios["prefill over llama.cpp Q4_1"] == 5.0
    assert ratios["prefill over llama.cpp Q4_0"] is None


def test_requantising_changes_the_q4_1_tensors_only(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight, norm = rng.normal(size=(4, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(weight, q4_1), raw_dtype=q4_1)
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantise(source, target)
    made = gguf.GGUFReader(target)
    tensors = {tensor.name: tensor for tensor in made.tensors}
    assert tensors["blk.0.attn_q.weight"].tensor_type == gguf.GGMLQuantizationType.Q4_0
    values = gguf.dequantize(tensors["blk.0.attn_q.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    assert np.abs(values - weight).max() < 0.3
    assert (tensors["output_norm.weight"].data == norm).all()
    assert made.fields["llama.block_count"].contents() == 3
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]
