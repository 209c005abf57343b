"""Turns a spec string into a drafter: ``auto``, ``ngram:min=2,max=5,size=5``, ``model:PATH``, ``ngram+suffix``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outpace.drafters.base import DraftContext, Drafter
from outpace.drafters.catalogue import AUTO, COMMON, METHODS
from outpace.errors import DrafterError

if TYPE_CHECKING:
    from outpace.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec: ``name[:argument][,option=value...]``, or several joined by ``+``: then ``parts`` has them.

    ``size`` is the engine's; the rest is the drafter's. ``auto`` is parsed as what it stands for beside any target, and
    as a part; where it stands alone, ``build``, which knows the target, may choose better.
    """

    text: str
    name: str
    argument: str | None
    options: Mapping[str, str]
    parts: tuple[DrafterSpec, ...] = ()
    auto: bool = False

    @property
    def size(self) -> int | Literal["auto"] | None:
        """The draft size that the spec asks for, if it does."""
        return "auto" if self.options.get("size") == "auto" else self.integer("size", None)

    def arguments_of(self, name: str) -> list[str]:
        """Arguments of the parts, or of the spec itself, that are called ``name``."""
        return [spec.argument for spec in self.parts or (self,) if spec.name == name and spec.argument is not None]

    def flag(self, option: str, default: bool) -> bool:
        text = self.options.get(option)
        if text not in (None, "0", "1"):
            raise DrafterError(f"{self.text}: {option}={text} is neither 0 (off) nor 1 (on)")
        return default if text is None else text == "1"

    def integer(self, option: str, default: int | None) -> int | None:
        text = self.options.get(option)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            raise DrafterError(f"{self.text}: {option}={text} is not a whole number") from None


def parse(text: str) -> DrafterSpec:
    """Parse and check a spec. Raises DrafterError that lists what there is."""
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
    return _BUILDERS[spec.name](spec, context)


def _none(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.none import NoDrafter

    return NoDrafter()


def _ngram(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.lookup.ngram import NgramDrafter

    given = {
        "least": spec.integer("min", None),
        "most": spec.integer("max", None),
        "candidates": spec.integer("candidates", None),
    }
    return NgramDrafter(**{name: value for name, value in given.items() if value is not None})


def _suffix(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.lookup.suffix import SuffixDrafter

    given = {"most": spec.integer("max", None)}
    mebibytes = spec.integer("memory", None)
    if mebibytes is not None:
        given["memory"] = mebibytes << 20 if mebibytes > 0 else 0
    return SuffixDrafter(
        tree=spec.flag("tree", True),
        history=spec.flag("history", False),
        vocab=context.target.info.vocab_size,
        file=spec.options.get("file"),
        **{name: value for name, value in given.items() if value is not None},
    )


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


def _lookahead(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.forward.lookahead import LookaheadDrafter

    given = {name: spec.integer(name, None) for name in ("window", "ngram", "guesses")}
    drafter = LookaheadDrafter(**{name: value for name, value in given.items() if value is not None})
    drafter.check_acceptance(context.acceptance)
    return drafter


def _retrieval(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.lookup.datastore import Datastore, fingerprint
    from outpace.drafters.lookup.retrieval import RetrievalDrafter

    assert spec.argument is not None
    datastore = Datastore(spec.argument, fingerprint(context.tokenizer) if context.tokenizer is not None else None)
    given = {"places": spec.integer("places", None), "least": spec.integer("min", None)}
    given["vocab"] = context.target.info.vocab_size
    return RetrievalDrafter(datastore, **{name: value for name, value in given.items() if value is not None})


def draft_models(spec: DrafterSpec, options: LoadOptions) -> list[tuple[str, LoadOptions]]:
    """The draft models that ``spec`` names, and how each is loaded beside a target loaded with ``options``.

    Trust in the target's repository is no trust in the draft model's, and its revision none of theirs: those come from
    the spec alone. Raises DrafterError.
    """
    return [
        (
            part.argument,
            replace(
                options,
                kv_memory=None,
                max_length=None,
                revision=part.options.get("revision"),
                trust_remote_code=part.flag("trust", False),
                allow_pickle=part.flag("pickle", False),
            ),
        )
        for part in spec.parts or (spec,)
        if part.name == "model" and part.argument is not None
    ]


def _model(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.forward.model import load

    ((model, options),) = draft_models(spec, context.options)
    return load(model, context, options)


def _layers(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.forward.layers import LayersDrafter

    assert spec.argument is not None
    try:
        layers = int(spec.argument)
    except ValueError:
        raise DrafterError(f"{spec.text}: {spec.argument!r} is not a number of layers, as in layers:10") from None
    return LayersDrafter(context.target, layers)


def _eagle(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.learned import shipped
    from outpace.drafters.learned.load import load_eagle

    assert spec.argument is not None
    path: str | Path = spec.argument
    if path in shipped.NAMES:
        path = shipped.located(context.target.info, context.options)
    options = {name: spec.integer(name, None) for name in ("branch", "levels")}
    return load_eagle(path, context, name=f"eagle:{spec.argument}", quantize=spec.options.get("quantize"), **options)


def _parallel(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.learned.load import load_parallel

    assert spec.argument is not None
    return load_parallel(spec.argument, context)


def _medusa(spec: DrafterSpec, context: DraftContext) -> Drafter:
    from outpace.drafters.learned.load import load_medusa

    assert spec.argument is not None
    return load_medusa(spec.argument, context)


_BUILDERS: Mapping[str, Callable[[DrafterSpec, DraftContext], Drafter]] = {  # of every method but ``auto``
    "none": _none,
    "ngram": _ngram,
    "suffix": _suffix,
    "lookahead": _lookahead,
    "retrieval": _retrieval,
    "layers": _layers,
    "model": _model,
    "eagle": _eagle,
    "parallel": _parallel,
    "medusa": _medusa,
}
