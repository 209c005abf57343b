"""Turns a spec string into a drafter: ``auto``, ``ngram:min=2,max=5,size=5``, ``model:PATH``, ``ngram+suffix``.

The methods that there are stand in catalogue.py; nothing here names one.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outpace.drafters.base import DraftContext, Drafter, DrafterSource, described
from outpace.drafters.catalogue import AUTO, COMMON, METHODS
from outpace.drafters.lookup.segment_files import MANIFEST
from outpace.drafters.spec import DrafterSpec
from outpace.errors import DrafterError, ModelError, OutpaceError

ENTRY_POINTS = "outpace.drafters"  # the group in which installed packages name theirs

log = logging.getLogger(__name__)


def parse(text: DrafterSource) -> DrafterSpec:
    """Parse and check a spec; an ``os.PathLike`` leads to a trained drafter, a datastore or a draft model; a Drafter,
    or what makes one of a DraftContext, stands for itself. Raises DrafterError that lists what there is."""
    if isinstance(text, os.PathLike):
        return _of_path(Path(text))
    if isinstance(text, Drafter) or (callable(text) and not isinstance(text, str)):
        name = str(getattr(text, "name", None) or getattr(text, "__name__", type(text).__name__))
        return DrafterSpec(name, name, None, {}, made=text)
    if not isinstance(text, str):
        raise DrafterError(
            f"a drafter is a text such as 'ngram', a path, a Drafter or what makes one, and {text!r} is none of them"
        )
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
    from outpace.drafters.learned.assistant_files import is_assistant
    from outpace.drafters.learned.checkpoint import method_of

    if not path.exists():
        raise DrafterError(f"{path} does not exist: check the path, or name a method: {', '.join(METHODS)}")
    name = "retrieval" if (path / MANIFEST).is_file() else method_of(path) or "model"
    name = "drafter" if is_assistant(path) else name
    return DrafterSpec(f"{name}:{path}", name, str(path), {})


def _split(text: str) -> list[str]:
    """The specs that ``+`` joins. After a colon, where a path may stand, a ``+`` only counts when a drafter's name
    follows, ended by a colon, another ``+`` or the end."""
    names = "|".join(map(re.escape, (*METHODS, *installed())))
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
        return _own(text, name, rest)
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


@cache
def installed() -> dict[str, str]:
    """Drafters of installed packages: what makes each, ``module:name``, by its entry point in ``outpace.drafters``."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS) if point.name not in METHODS}


def _own(text: str, name: str, rest: str) -> DrafterSpec:
    """``NAME,option=value`` of an entry point, or ``module:Class,option=value``."""
    parts = [part for part in rest.split(",") if part]
    made = installed().get(name)
    if made is None and parts and parts[0].isidentifier() and all(word.isidentifier() for word in name.split(".")):
        made = f"{name}:{parts.pop(0)}" if _there(name) else None
    if made is None:
        close = difflib.get_close_matches(name, (*METHODS, *installed()), 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join((*METHODS, *installed()))
        raise DrafterError(f"unknown drafter {name!r}{hint}: use one of {known}, or module:Class of your own")
    pairs = [part.partition("=") for part in parts]
    if wrong := [key for key, equals, _ in pairs if not equals or not key.isidentifier()]:
        raise DrafterError(f"{text}: {wrong[0]!r} is no option: write option=value after {made}")
    return DrafterSpec(text, name, None, {key: value for key, _, value in pairs}, made=made)


def _there(module: str) -> bool:
    """Whether the module can be imported; one of the current folder can, even from a command."""
    first, here = module.partition(".")[0], os.getcwd()
    if here not in sys.path and (Path(here, first).is_dir() or Path(here, f"{first}.py").is_file()):
        sys.path.append(here)
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _made(spec: DrafterSpec, context: DraftContext) -> Drafter:
    """A drafter of the user's own. Whatever making it raises is a DrafterError that says where."""
    if isinstance(spec.made, Drafter):
        return described(spec.made, spec.text)
    maker: Any = spec.made
    options = {name: value for name, value in spec.options.items() if name not in COMMON}
    try:
        if isinstance(maker, str):
            module, _, path = maker.partition(":")
            maker = import_module(module)
            for word in path.split("."):
                maker = getattr(maker, word)
        drafter = maker(context, **options)
    except OutpaceError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise DrafterError(f"{spec.text}: the drafter could not be made with a DraftContext ({what})") from error
    if not isinstance(drafter, Drafter):
        raise DrafterError(f"{spec.text} makes {drafter!r}: it must be an outpace.drafters.base.Drafter")
    return described(drafter, spec.text)


def build(spec: DrafterSpec, context: DraftContext) -> Drafter:
    """The drafter that ``spec`` describes. Raises DrafterError or ModelError."""
    if spec.made is not None:
        return _made(spec, context)
    if spec.auto:
        return _auto(spec, context)
    if spec.parts:
        return _composed(spec, context)
    module, _, function = METHODS[spec.name].build.partition(":")
    drafter: Drafter = getattr(import_module(module), function)(spec, context)
    return drafter


def _auto(spec: DrafterSpec, context: DraftContext) -> Drafter:
    """What ``auto`` stands for; where that cannot be made, what it stands for where nothing was measured, or the lookup
    alone."""
    from outpace.drafters.auto import choose, unmeasured

    target, options = context.target, context.options
    choices = [choose(target.info, options, target.drafts)]
    if choices[0].measured:
        log.info("auto stands for %s: %s", choices[0].spec, choices[0].why)
        choices.append(unmeasured(target.info, options, target.drafts))
    left = ""  # why it is not what was measured
    for choice in choices:
        try:
            chosen = parse(choice.spec)
            drafter = build(replace(chosen, options={**chosen.options, **spec.options}), context)
            drafter.why = "; ".join(filter(None, (choice.why, left)))
            return drafter
        except (DrafterError, ModelError) as error:
            if choice.spec == AUTO:
                raise
            again = ": measure again with outpace drafters --measure" if choice.measured else ""
            left = f"{choice.spec} cannot be used: {error}{again}"
            log.warning("auto does not stand for %s, which cannot be used: %s%s", choice.spec, error, again)
    drafter = build(replace(parse(AUTO), options=spec.options), context)
    drafter.why = left
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
