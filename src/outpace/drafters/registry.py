"""Turns a spec string into a drafter: ``auto``, ``ngram:min=2,max=5,size=5``, ``model:PATH``, ``ngram+suffix``.

The methods that there are stand in catalogue.py; nothing here names one.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from outpace.common.files import StrPath
from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.catalogue import AUTO, COMMON, METHODS
from outpace.drafters.lookup.segment_files import MANIFEST
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError


def parse(text: StrPath) -> DrafterSpec:
    """Parse and check a spec; an ``os.PathLike`` leads to a trained drafter, a datastore or a draft model. Raises
    DrafterError that lists what there is."""
    if isinstance(text, os.PathLike):
        return _of_path(Path(text))
    if not isinstance(text, str):
        raise DrafterError(f"a drafter is named by a text such as 'ngram', or by a path, and {text!r} is neither")
    parts = tuple(_parse_one(part) for part in _split(text))
    if len(parts) == 1:
        if parts[0].flag("fallback", False):
            raise DrafterError(f"{text}: fallback=1 needs drafters before it: join them with +")
        return parts[0]
    if any(part.name == "none" for part in parts):
        raise DrafterError(f"{text}: none drafts nothing, so it cannot be combined: leave it out")
    asked = {part.options["size"] for part in parts if "size" in part.options}
    if len(asked) > 1:
        raise DrafterError(
            f"{text}: sizes {', '.join(sorted(asked))} differ, but parts share one budget: give one size="
        )
    options = {"size": asked.pop()} if asked else {}
    return DrafterSpec(text, "+".join(part.name for part in parts), None, options, parts)


def _of_path(path: Path) -> DrafterSpec:
    from outpace.drafters.learned.checkpoint import method_of

    if not path.exists():
        raise DrafterError(f"{path} does not exist: check the path, or name a method: {', '.join(METHODS)}")
    name = "retrieval" if (path / MANIFEST).is_file() else method_of(path) or "model"
    return DrafterSpec(f"{name}:{path}", name, str(path), {})


def _split(text: str) -> list[str]:
    """The specs that ``+`` joins. After a colon, where a path may stand, a ``+`` only counts when a drafter's name
    follows, ended by a colon, another ``+`` or the end."""
    names = "|".join(METHODS)
    specs = [""]
    for piece in re.split(r"(\+)", text):
        at_join = specs[-1].endswith("+")
        joins = at_join and (":" not in specs[-1] or re.fullmatch(rf"\s*({names})\s*(:.*)?", piece, re.DOTALL))
        if joins:
            specs[-1] = specs[-1][:-1]
            specs.append(piece)
        else:
            specs[-1] += piece
    return specs


def _parse_one(text: str) -> DrafterSpec:
    name, _, rest = text.strip().partition(":")
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise DrafterError(f"unknown drafter {name!r}{hint}: use one of {', '.join(METHODS)}")
    method = METHODS[name]
    argument, options = None, {}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if equals and key in (*method.options, *COMMON):
            options[key] = value
        elif method.argument and argument is None and not options:
            argument = part
        else:
            known = ", ".join(f"{option}=" for option in (*method.options, *COMMON))
            raise DrafterError(f"{text}: {part!r} is no option of {name}: it takes {known}")
    if method.argument and not argument:
        raise DrafterError(f"{text}: {name} needs {method.argument}, as in {name}:{method.example}")
    return DrafterSpec(text, AUTO if name == "auto" else name, argument, options, auto=name == "auto")


def build(spec: DrafterSpec, context: DraftContext) -> Drafter:
    """The drafter that ``spec`` describes. Raises DrafterError or ModelError."""
    if spec.auto:
        from outpace.drafters.learned.shipped import choose

        chosen = parse(choose(context.target.info, context.options).spec)
        return build(replace(chosen, options={**chosen.options, **spec.options}), context)
    if spec.parts:
        return _composed(spec, context)
    module, _, function = METHODS[spec.name].build.partition(":")
    drafter: Drafter = getattr(import_module(module), function)(spec, context)
    return drafter


def _composed(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.composed import ComposedDrafter

    with ExitStack() as on_failure:  # what was built is closed when something later fails
        parts: list[Drafter] = []
        for part in spec.parts:
            drafter = build(replace(part, auto=False), context)
            on_failure.callback(drafter.close)
            parts.append(drafter)
        composed = ComposedDrafter(parts, [part.flag("fallback", False) for part in spec.parts])
        composed.check_acceptance(context.acceptance)
        on_failure.pop_all()
    return composed
