"""What a drafter was asked for: the parsed text of ``ngram:min=2,max=5,size=5``, ``model:PATH``, ``ngram+suffix``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from outpace.errors import DrafterError

if TYPE_CHECKING:
    from outpace.drafters.base import Drafter
    from outpace.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A parsed spec: ``name[:argument][,option=value...]``, or several joined by ``+``: then ``parts`` has them.

    ``size`` is the engine's; the rest is the drafter's. ``auto`` is parsed as what it stands for beside any target, and
    as a part; where it stands alone, ``build``, which knows the target, may choose better. ``made``: a drafter of the
    user's own, or what makes one of a DraftContext and the options, as an object or as ``module:name``.
    """

    text: str
    name: str
    argument: str | None
    options: Mapping[str, str]
    parts: tuple[DrafterSpec, ...] = ()
    auto: bool = False
    made: Drafter | Callable[..., Drafter] | str | None = None

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

    def given(self, **names: str) -> dict[str, int]:
        """The whole numbers that are given, by the name of an argument: ``given(least="min")``."""
        found = {argument: self.integer(option, None) for argument, option in names.items()}
        return {argument: value for argument, value in found.items() if value is not None}

    def memory(self) -> dict[str, int]:
        """``memory``, given in MiB, in bytes."""
        return {name: max(value, 0) << 20 for name, value in self.given(memory="memory").items()}


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
                strict=False,
                revision=part.options.get("revision"),
                trust_remote_code=part.flag("trust", False),
                allow_pickle=part.flag("pickle", False),
            ),
        )
        for part in spec.parts or (spec,)
        if part.name == "model" and part.argument is not None
    ]
