"""``outpace train``: data for learned drafters, and the drafters."""

from __future__ import annotations

from outpace.cli.command import Group
from outpace.cli.train import data, methods

COMMAND = Group(
    "train",
    "Train drafters that know the target: data, then the network.",
    "outpace train data --model demo --prompts prompts.jsonl --out DIR",
    (*data.COMMANDS, *methods.COMMANDS),
)
