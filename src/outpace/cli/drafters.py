"""``outpace drafters``: which drafters others have published for a model, and the command that uses each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from outpace.cli.command import Command
from outpace.cli.options import Common
from outpace.cli.terminal import table
from outpace.common.parameter import argument
from outpace.errors import Argument, ParameterError


@dataclass(frozen=True, slots=True)
class Entry:
    """A drafter of a model: ``command`` uses it."""

    drafter: str
    made_for: str
    source: str
    command: str


def run(
    common: Common,
    model: Annotated[str, argument("A model, as --model takes it. It is not loaded.", metavar="MODEL")],
) -> int:
    """List drafters that were published for a model, with the command that uses each."""
    from outpace.drafters.published import DATE, known_for

    if not model.strip():
        raise ParameterError(Argument("model", model), " is no name: give a model's, ORG/NAME or a path")
    found = [
        Entry(each.spec, each.model, each.source, f"outpace generate -m {model} -d suffix+{each.spec} 'Hello'")
        for each in known_for(model)
    ]
    if common.emit({"date": DATE, "model": model, "drafters": [asdict(entry) for entry in found]}):
        return 0
    if found:
        print(table(["drafter", "for", "source"], [[e.drafter, e.made_for, e.source] for e in found], 3))
        print(f"\nAs of {DATE}. Beside a fine-tune of that model fewer drafts are accepted. To try one:")
        print(f"    {found[0].command}\nWhat each brings on your prompts, here:")
        print(f"    outpace recommend -m {model} -d suffix+{found[0].drafter} --measure PROMPTS")
    else:
        print(f"None is known for {model} as of {DATE}. What needs none: suffix, a smaller model of the same family")
        print("(model:ID), and the layer that drafts in the model's own files, which auto takes where there is one.")
    return 0


COMMAND = Command("drafters", run, "outpace drafters Qwen/Qwen3-8B")
