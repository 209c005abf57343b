"""Filling in the middle: the tokens that models were trained with for it, and prompts that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outpace.common.arrays import I32

# As llama.cpp finds them (src/llama-vocab.cpp, commit 00ad355e): of Qwen, CodeLlama, Granite, DeepSeek, GLM, Falcon.
_SPELLED: Mapping[str, tuple[str, ...]] = {
    "prefix": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
        "<|prefix|>",
    ),
    "suffix": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>",
        "<|suffix|>",
    ),
    "middle": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>",
        "<|middle|>",
    ),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
}  # fmt: skip
_REPOSITORY, _FILE = "myproject\n", "filename\n"  # llama.cpp's names of what a request does not name
_SNIPPET = "\n\n--- snippet ---\n\n"  # its border between texts, where there is no token for files


@dataclass(frozen=True, slots=True)
class Middle:
    """Ids of a model's tokens: what stands before the text that goes before, before the one that follows, and before
    what is to be written between them; before the names of a repository and of each file, and after a middle that is
    complete, where there are such."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    pad: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """What ends a middle beside the model's own ends."""
        return tuple(token for token in (self.pad, self.repository, self.file) if token is not None)

    def prompt(
        self,
        encode: Callable[[str], I32],
        before: I32,
        after: I32,
        *,
        start: Sequence[int] = (),
        files: Sequence[tuple[str, str]] | None = None,
        begun: Sequence[int] = (),
        most: int,
    ) -> I32:
        """Token ids int32 [n], at most ``most``, after which the model writes what is between ``before`` and ``after``.

        ``encode``: makes ids of plain text; ``start``: what a prompt begins with; ``files``: names and texts of what
        else belongs to the work (None: one file stands alone, without a name); ``begun``: ids with which the middle
        begins. What is too much goes: of other files the first tokens, then what is far from the middle, of which a
        quarter may be ``after``. The order is that of llama.cpp's code (its README has ``begun`` last), but that
        ``start`` comes first.
        """
        room = max(most - 3 - len(start) - len(begun), 0)
        after = after[: max(room // 4, room - len(before))]
        before = before[max(len(before) - (room - len(after)), 0) :]
        left = room - len(before) - len(after)
        beside = [] if files is None else self._beside(encode, files, left)
        parts = (start, beside, [self.prefix], before, begun, [self.suffix], after, [self.middle])
        return np.concatenate([np.asarray(part, np.int32) for part in parts])

    def _beside(self, encode: Callable[[str], I32], files: Sequence[tuple[str, str]], most: int) -> list[int]:
        """The last ``most`` ids of what stands before. It is made from its end: texts that would go are not encoded."""
        blocks = [[] if self.file is None else [self.file, *encode(_FILE).tolist()]]
        size = len(blocks[0])
        for name, text in reversed(files):
            if size >= most:
                break
            border = [] if self.file is None else [self.file]
            border += encode(_SNIPPET if self.file is None else f"{name}\n").tolist()
            blocks.append([*border, *encode(text).tolist()])
            size += len(blocks[-1])
        if self.repository is not None:
            blocks.append([self.repository, *encode(_REPOSITORY).tolist()])
        beside = [token for block in reversed(blocks) for token in block]
        return beside[max(len(beside) - most, 0) :]


def found(id_of: Callable[[str], int | None], keyed: Mapping[str, int]) -> Middle | None:
    """The tokens of a vocabulary: as ``keyed`` says, by fields of ``Middle``, and else by their names. None where the
    model has none."""
    ids = dict(keyed)
    for field, names in _SPELLED.items():
        for token in map(id_of, names):
            if token is not None:
                ids.setdefault(field, token)
    return Middle(**ids) if {"prefix", "suffix", "middle"} <= ids.keys() else None
