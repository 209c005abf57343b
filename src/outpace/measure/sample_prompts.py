"""Prompts to measure drafters with where the user gives none: half of them answers that repeat their prompt, half not.

What a drafter brings depends on the text: whoever has prompts of their own measures with those.
"""

from __future__ import annotations

from outpace.measure.prompts import PromptRow

_NOTE = (
    "The harbour office opens at eight. Ships that arrive during the night wait at the outer quay until the harbour "
    "master has seen their papers. Fishing boats go to the inner basin at once. Visitors pay at the office, in cash or "
    "by card, and keep the receipt until they leave the harbour."
)
_CODE = (
    "def total(prices, rate):\n    result = 0\n    for price in prices:\n        result = result + price * (1 + rate)\n"
    "    return result\n"
)
_ASKED = (
    ("edit", f"Rewrite this note in the past tense and change nothing else:\n\n{_NOTE}"),
    ("chat", "A friend wants to start running. What would you tell them about the first four weeks?"),
    ("code", f"Add type hints and a docstring to this function, and show all of it:\n\n{_CODE}"),
    ("explain", "Why does the moon show us always the same side? Explain it in two short paragraphs."),
    ("summary", f"Summarise this note in three points:\n\n{_NOTE}"),
    ("write", "Write a short letter to a landlord about a window that does not close."),
    ("list", "Write the numbers from one to twenty as words, one on a line, as '1: one'."),
    ("reason", "A train leaves at 9:40 and takes two hours and 35 minutes. When does it arrive? Show each step."),
)

SAMPLE: tuple[PromptRow, ...] = tuple(
    PromptRow(str(number), category, (text,)) for number, (category, text) in enumerate(_ASKED, 1)
)
