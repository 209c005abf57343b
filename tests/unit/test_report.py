"""The page of results: every kind of benchmark, machines side by side, nothing from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.figures import made
from outpace.cli import app
from outpace.errors import ParameterError
from outpace.measure.page import Bar, bars
from outpace.measure.report import FAMILIES, fastest, picture, read, sections

HERE = Path(__file__).parents[2]
SPEED = {"tokens_per_second": 90.0, "first_p50": 0.02}
COUNTS = {"changed": 1, "answers": 40, "bits": 2}
KINDS: dict[str, Any] = {
    "serving": {"servers": {"outpace": {"concurrency": {"4": SPEED}}}, "commands": {"outpace": "outpace serve"}},
    "invariance": {"scores": {"outpace": {**COUNTS, "changed": 0}, "other": COUNTS},
                   "commands": {"outpace": ["one", "two"]}},
    "prove": {"cases": {f"ngram T={t} size=4 batch=1": [{"identical": t < 1}] for t in (0.0, 1.2)}},
    "scores": {"tasks": {"copy": {"scores": {"exact": 0.25}, "same": True, "answers": 8}}},
    "bench": {"configs": [{"name": "<none>", "decode_tokens_per_second": 80.0, "tokens_per_step": 1.0, "identical": 2,
                           "prompts": 2}], "runs": [{"text": "of a user"}]},
}  # fmt: skip


def written(folder: Path, machine: str) -> list[Path]:
    folder.mkdir()
    paths = []
    for name, value in KINDS.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps({**value, **made(), "machine": {"model": machine, "cores": 2}}))
    return paths


def test_machines_stand_side_by_side_in_one_page(tmp_path: Path) -> None:
    peers = HERE / "docs/results/peers.json"
    results = [
        peers,
        HERE / "docs/results/peers-1b.json",
        *written(tmp_path / "a", "one & two"),
        *written(tmp_path / "b", "three"),
    ]
    page, keep = tmp_path / "report.html", tmp_path / "kept" / "results"
    chart = tmp_path / "speed"
    run = app.parse(["report", *map(str, results), "-o", str(page), "--chart", str(chart), "--keep", str(keep)])
    assert run() == 0
    text = page.read_text()
    for shown in ("one &amp; two, 2 cores", "three, 2 cores", "1 of 2 answers identical", "0 of 40 answers changed",
                  "exact 0.25; plain and drafted the same", "90 tokens/s, first token 20 ms", "&lt;none&gt;",
                  "outpace: outpace serve", "outpace: two", "(1 of 40)",
                  "peers.json", read(peers).machine):  # fmt: skip
        assert shown in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "runs" not in json.loads((keep / "bench.json").read_text())
    for theme in ("light", "dark"):  # the README's are of the results that lie beside them
        drawn = Path(f"{chart}-{theme}.svg").read_text()
        assert drawn == (HERE / f"docs/images/speed-{theme}.svg").read_text()
        checks = picture([read(HERE / "docs/results/forward-1b.json")], theme)
        assert checks == (HERE / f"docs/images/checks-{theme}.svg").read_text()
    table = sections([read(path) for path in results[2:]])[0]
    assert table.heads == ["", "one & two, 2 cores", "three, 2 cores"]
    assert len(table.lines[0]) == 3


def test_no_label_of_a_picture_is_cut() -> None:
    """Measured in DejaVu Sans, which is wider than what browsers take for system-ui."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    peers = read(HERE / "docs/results/peers.json")
    long = [
        Bar("llama.cpp Q4_0, built here, draft-eagle3, " * 2, 90.0, "20 of 24 answers changed, " * 3),
        Bar("c", 1.0),
    ]
    for drawn in (
        picture([read(HERE / "docs/results/forward-1b.json")], "light"),
        picture([peers, peers], "light"),
        bars(peers.bars, "all", peers.about),
        bars(fastest(peers.value), "four", "d " * 200),
        bars(long, "", ""),
    ):
        root = ElementTree.fromstring(drawn)
        (left, _, width, _) = map(float, root.attrib["viewBox"].split())
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            if not "".join(text.itertext()):
                continue
            said, size = "".join(text.itertext()), float(text.get("font-size", "14"))
            weight = "bold" if "font-weight" in text.attrib else "normal"
            takes = (
                TextPath((0, 0), said, prop=FontProperties(family="DejaVu Sans", weight=weight), size=size)
                .get_extents()
                .width
            )
            at = float(text.attrib["x"]) - (takes if text.get("text-anchor") == "end" else 0)
            assert left <= at < at + takes <= width, said


@pytest.mark.parametrize("name", ["peers", "peers-1b"])
def test_the_readmes_picture_has_a_bar_an_engine(name: str) -> None:
    value = json.loads((HERE / f"docs/results/{name}.json").read_text())
    shown = {bar.label: bar for bar in fastest(value)}
    assert list(shown)[-1] == "Outpace"
    for family, label in FAMILIES.items():
        rows = [row for row in value["table"] if row["config"].startswith(family)]
        assert bool(rows) == (label in shown)
        if rows:
            assert shown[label].value == max(row["decode_tokens_per_second"] for row in rows)
            plain = {"plain", "paged", "none"}
            assert shown[label].mark == max(
                row["decode_tokens_per_second"] for row in rows if row["config"].split()[1] in plain
            )
    assert shown["Outpace"].note.endswith("no answer changed")
    (bar,) = fastest({"table": [row for row in value["table"] if row["config"] == "outpace suffix"]})
    assert (bar.note, bar.mark) == ("suffix; no answer changed", 0.0), "no plain speed was measured"


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    for text, why in (("{}", "is no result"), ("{", "cannot be read"), ('{"table": [{}]}', "cannot be read")):
        path = tmp_path / "a.json"
        path.write_text(text)
        with pytest.raises(ParameterError, match=why):
            read(path)
    path.write_text(json.dumps(KINDS["prove"]))
    with pytest.raises(ParameterError, match="peers"):
        app.parse(["report", str(path), "-o", str(tmp_path / "a.html"), "--chart", str(tmp_path / "b")])()
