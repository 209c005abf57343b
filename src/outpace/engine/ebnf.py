"""EBNF as llama.cpp and XGrammar write it (``root ::= "a" | b``), turned into Lark by llguidance's converter."""

from __future__ import annotations

import re

from outpace.errors import GrammarError

# The converter goes through all of the text once for every rule: at most two seconds at these bounds.
MOST_RULES = 256
MOST_TEXT = 1 << 14  # characters
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def is_ebnf(text: str) -> bool:
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Raises GrammarError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MOST_TEXT or text.count("::=") > MOST_RULES:
        raise GrammarError(
            f"the EBNF grammar has {text.count('::=')} rules in {len(text)} characters: at most {MOST_RULES} in "
            f"{MOST_TEXT} are taken; write it in Lark"
        )
    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_character, text))
    except Exception as error:  # the converter raises bare Exception, and IndexError at the end of a text
        raise GrammarError(f"the EBNF grammar cannot be used ({error}): mend it or write it in Lark") from error
    return lark.removeprefix("%llguidance {}")


def _character(found: re.Match[str]) -> str:
    """Escapes of code points, whose leading zeros the converter drops, as it can take them."""
    digits = found[1] or found[2]
    if digits is None or 0xD800 <= (code := int(digits, 16)) < 0xE000 or code > 0x10FFFF:
        return found[0]  # another escape, or no character's, which is refused later
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
