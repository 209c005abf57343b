"""What others' users met (prefix hits lost to speculation, unseeded drafts, late failures), where no other test is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from outpace import Engine, SamplingParams
from outpace.drafters.learned.shipped import SPEC
from tests.server.serving import Running
from tests.server.test_lives import post

BEGINNING = "The same beginning for everybody, and quite long too: one two three, one two three, one two. " * 3


def test_drafting_loses_no_prefix_hit(demo: Running) -> None:
    """What a second request finds of the first one's KV, and what it says, is the same whoever drafts in either."""
    found = []
    for first, second in (({"off": True}, {"off": True}), ({"drafter": "ngram+suffix", "size": 4}, {"size": 4})):
        asked: dict[str, Any] = {"model": "demo", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_salt": str(first), "messages": [{"role": "user", "content": BEGINNING}]}
        status, _, one = post(demo, {**asked, "speculation": first})
        assert status == 200
        said = one["choices"][0]["message"]["content"]
        more = [*asked["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
        status, _, two = post(demo, {**asked, "messages": more, "speculation": second})
        assert status == 200
        cached = [its["usage"]["prompt_tokens_details"]["cached_tokens"] for its in (one, two)]
        found.append((cached, said, two["choices"][0]["message"]["content"]))
        accepted = two["usage"]["speculation"]["accepted"]
    assert found[0] == found[1]
    assert found[0][0][0] == 0 < found[0][0][1]
    assert accepted > 0
    demo.at_rest()


def test_drafts_are_seeded_under_rejection() -> None:
    """A drafter that samples, and what is drawn in place of a draft that was refused: the same for the same seed."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    options: dict[str, Any] = {"acceptance": "rejection", "reuse_prefix": False}
    with Engine.load("demo", drafter=SPEC, size=4, acceptance="rejection", max_length=256) as engine:
        first, second = (engine.generate("Count from one to ten.", params, **options) for _ in range(2))
        other = engine.generate("Count from one to ten.", params.with_(seed=6), **options)
    assert first.token_ids == second.token_ids != other.token_ids
    assert 0 < first.stats.accepted < first.stats.drafted


def test_a_wrong_size_is_said_before_a_model_is_looked_for() -> None:
    command = [sys.executable, "-m", "outpace", "serve", "--port", "0", "--model", "no/such/model", "--size", "99"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--size 99" in done.stderr
