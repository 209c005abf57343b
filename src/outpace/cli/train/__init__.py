"""``outpace train``: data for learned drafters, and the drafters."""

from __future__ import annotations

from outpace.cli.command import Group
from outpace.cli.train import data, methods

COMMAND = Group(
    "train",
    "Train drafters that know the target: data, then the network.",
    "outpace train data --prompts prompts.jsonl --out answers\n"
    "outpace train eagle --data answers --out drafter --minutes 30\n"
    "outpace generate 'Hello?' -d eagle:drafter --compare",
    (*data.COMMANDS, *methods.COMMANDS),
)
