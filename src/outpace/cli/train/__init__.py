"""``outpace train``: data for learned drafters, and the drafters. A command is one file, and one entry below."""

from __future__ import annotations

from outpace.cli.command import Group
from outpace.cli.train import cache, data, foreign, methods

COMMAND = Group(
    "train",
    "Train drafters that know the target: data, then the network.",
    "outpace train data --model demo --prompts prompts.jsonl --out DIR",
    (data.COMMAND, cache.COMMAND, foreign.COMMAND, *methods.COMMANDS),
)
