"""An EAGLE drafter takes new weights between steps: requests that run say what they would have said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outpace import Engine, SamplingParams
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.composed import ComposedDrafter
from outpace.drafters.learned.checkpoint import Checkpoint
from outpace.drafters.learned.checkpoint import write as write_checkpoint
from outpace.drafters.learned.eagle import EagleDrafter
from outpace.drafters.learned.load import load_eagle
from outpace.drafters.lookup.ngram import NgramDrafter
from outpace.errors import DrafterError, ModelError
from outpace.exact.drafts import Drafts
from outpace.models.options import LoadOptions
from tests import eagles
from tests.by_hand import PROMPTS, Target, answers, assert_same, forked, view
from tests.integration.conftest import VOCAB, Load

LAYERS = (0, 1, 2)
IDS = (0, 1, 3, 4, 5, 7, 8, 10, 11)


def save(folder: Path, its: Checkpoint) -> None:
    write_checkpoint(folder, "eagle", its.config, its.tensors, {}, {}, dtype="float32")


def loaded(folder: Path, model: Any, **options: Any) -> EagleDrafter:
    return load_eagle(folder, DraftContext(model, None, LoadOptions(), 6, "coupled"), name="eagle", **options)


@pytest.mark.parametrize("kind", ["eagle", "ngram+eagle"])
def test_outputs_stay_plain_decoding_s(load: Load, tmp_path: Path, kind: str) -> None:
    model = load(4)
    for seed in (1, 2):
        save(tmp_path / str(seed), eagles.random(model, IDS, LAYERS, seed=seed))
    link = tmp_path / "drafter"
    link.symlink_to("1")
    drafter: Drafter = loaded(link, model)
    if kind != "eagle":
        drafter = ComposedDrafter([NgramDrafter(), drafter])
    params, found, steps, taken = SamplingParams(max_tokens=25, temperature=2.0), {}, 0, 0
    with Engine(model, drafter=drafter, size=6, prefill_chunk=8, max_rows=3, prefix_rows=2) as engine:
        assert not engine.reload()
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, params.with_(seed=i))
        while not engine.idle:
            found |= {delta.request: delta.result for delta in engine.step() if delta.result is not None}
            engine.check()
            steps += 1
            if steps % 5 == 3:
                link.unlink()
                link.symlink_to(str(1 + steps % 2))
                taken += engine.reload()
                engine.check()
                assert not engine.reload()
    assert taken > 2
    plain = answers(load(4), None, params, size=6)
    assert [found[i].token_ids for i in sorted(found)] == [result.token_ids for result in plain]
    assert not any(result.notes for result in found.values())


def test_rows_keep_what_they_have_read(load: Load, tmp_path: Path) -> None:
    """There and back: drafts are those of a drafter that never changed. What rows share, they still share."""
    target, rng = Target(load(3), LAYERS), np.random.default_rng(3)
    save(tmp_path / "a", eagles.random(target.model, IDS, LAYERS, seed=1))
    save(tmp_path / "b", eagles.random(target.model, IDS, LAYERS, seed=2))
    link = tmp_path / "drafter"
    link.symlink_to("a")
    changing = loaded(link, target.model, branch=3)
    rows = [target.start(rng.integers(0, VOCAB, n).tolist(), changing) for n in (140, 64, 9)]

    def drafts(row: int) -> Drafts:
        return changing.propose([view(row, target.tokens[row])], np.array([7], np.int32))

    for row in rows:
        drafts(row)
    rows += [forked(target, changing, row) for row in rows[:2]]
    before, held = [drafts(row) for row in rows], changing.bytes
    for name in "ba":
        link.unlink()
        link.symlink_to(name)
        assert changing.reload()
        changing.check(rows)
        assert changing.bytes == held
        again = [drafts(row) for row in rows]
        same = [one.row(0).tokens == other.row(0).tokens for one, other in zip(before, again, strict=True)]
        assert all(same) if name == "a" else not any(same)
    for one, other in zip(before, again, strict=True):
        assert_same(one, 0, other, 0)
    for row in rows:
        changing.release(row)
    changing.check([])
    assert changing.bytes == 0


def test_what_does_not_fit_changes_nothing(load: Load, tmp_path: Path) -> None:
    model, folder = load(3), tmp_path / "drafter"
    save(folder, eagles.random(model, IDS, LAYERS))
    drafter = loaded(folder, model)
    save(folder, eagles.random(model, IDS[1:], LAYERS))
    for _ in range(2):
        with pytest.raises(DrafterError, match="has another shape or draft vocabulary now"):
            drafter.reload()
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        drafter.reload()
    save(folder, eagles.random(model, IDS, LAYERS, seed=5))
    assert drafter.reload()
    drafter.close()
