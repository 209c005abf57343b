"""Calls into logit rules, which may be anyone's code, and what they allow, as bits.

A mask is uint32 [ceil(V / 32)]: bit t % 32 of word t // 32 says that token t is allowed; bits beyond V mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outpace.common.arrays import U32
from outpace.errors import RuleError
from outpace.params import LogitRule


def called(rule: LogitRule, method: str, *args: Any) -> Any:
    """``rule.method(*args)``. Raises RuleError for whatever the rule raises."""
    try:
        return getattr(rule, method)(*args)
    except RuleError:  # a rule that wraps others' code has named it already
        raise
    except Exception as error:
        raise fault(f"{type(rule).__name__}.{method}", error) from error


def fault(who: str, error: Exception) -> RuleError:
    """What a rule's own error becomes."""
    message = f": {error}" if str(error) else ""
    return RuleError(f"{who} raised {type(error).__name__}{message}: mend the rule, or leave it out")


def mask_of(rule: LogitRule, state: Any, vocab_size: int | None = None) -> U32 | None:
    """What ``rule`` allows in ``state``; None where it does not say. Raises RuleError, also for another size."""
    if getattr(rule, "mask", None) is None:
        return None
    bits = called(rule, "mask", state)
    if bits is None:
        return None
    if not isinstance(bits, np.ndarray) or bits.dtype != np.uint32 or bits.ndim != 1:
        given = f"{bits.dtype} {list(bits.shape)}" if isinstance(bits, np.ndarray) else type(bits).__name__
        raise RuleError(f"{type(rule).__name__}.mask gave {given}: give None, or uint32 with one bit a token")
    if vocab_size is not None and len(bits) != words(vocab_size):
        raise RuleError(
            f"{type(rule).__name__}.mask gave {len(bits)} words, but {vocab_size} tokens take {words(vocab_size)}: "
            "build the rule for this model's vocabulary"
        )
    return bits


def allowed_mask(rules: Sequence[LogitRule], states: Sequence[Any]) -> U32 | None:
    """The tokens that every rule with a mask allows in its state; None where none says. Raises RuleError."""
    allowed: U32 | None = None
    for rule, state in zip(rules, states, strict=True):
        bits = mask_of(rule, state)
        if bits is None:
            continue
        if allowed is not None and len(bits) != len(allowed):
            raise RuleError(
                f"{type(rule).__name__}.mask gave {len(bits)} words where another rule gave {len(allowed)}: "
                "build both for the same vocabulary"
            )
        allowed = bits if allowed is None else allowed & bits
    return allowed


def forced_by(rules: Sequence[LogitRule], states: Sequence[Any]) -> list[int]:
    """The longest sequence that a rule says must follow. Raises RuleError."""
    longest: list[int] = []
    for rule, state in zip(rules, states, strict=True):
        if getattr(rule, "forced", None) is None:
            continue
        tokens = called(rule, "forced", state)
        try:
            found = [int(token) for token in tokens]
        except (TypeError, ValueError) as error:
            raise RuleError(f"{type(rule).__name__}.forced gave {tokens!r}: give a sequence of token ids") from error
        longest = max(longest, found, key=len)
    return longest


def allows(bits: U32, token: int) -> bool:
    """Whether a mask allows ``token``. False beyond its end."""
    word = token >> 5
    return 0 <= word < len(bits) and bool(int(bits[word]) >> (token & 31) & 1)


def words(vocab_size: int) -> int:
    """How many words a mask has."""
    return -(-vocab_size // 32)


def everything(vocab_size: int) -> U32:
    """A mask that allows all tokens."""
    return packed(np.ones(vocab_size, bool))


def packed(allowed: npt.NDArray[np.bool_]) -> U32:
    """The mask of bool [V]."""
    bits = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little")
    return bits.view("<u4").astype(np.uint32)


def unpacked(bits: U32, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [V]: which tokens a mask allows."""
    return np.unpackbits(bits.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
