"""``outpace train``: data for learned drafters, and the drafters. A command is one file, and one entry below."""

from __future__ import annotations

import typer

from outpace.cli.train import cache, data, distil, eagle, foreign, medusa, online, parallel

app = typer.Typer(help="Train drafters that know the target: data, then the network.", no_args_is_help=True)


def register(root: typer.Typer) -> None:
    root.add_typer(
        app, name="train", epilog="Example: outpace train data --model demo --prompts prompts.jsonl --out DIR"
    )
    for command in (data, cache, foreign, eagle, parallel, medusa, distil, online):
        command.register(app)
