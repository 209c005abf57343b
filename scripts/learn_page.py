"""A hook of mkdocs: the site has the page of ``outpace learn``, with the runs that ship, as learn-page.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.measure.learn import recorded, write


def on_post_build(config: Any, **_: Any) -> None:
    write(Path(config["site_dir"]) / "learn-page.html", recorded())
