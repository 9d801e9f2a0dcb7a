"""What was dropped and repaired on the way from files to documents, and what is done about faults (`data.errors`)."""

from __future__ import annotations

from dataclasses import dataclass, field

DROPPED = {
    "empty": "documents without text",
    "short": "documents below data.min_characters",
    "long": "documents above data.max_characters",
    "duplicate": "duplicate documents",
    "invalid_utf8": "lines that are not UTF-8",
    "malformed": "lines that are not valid JSON with text",
}
"""Reasons, in the order of the rule, each with what is counted."""

REPAIRED = {
    "invalid_utf8": "lines with bytes that are not UTF-8",
    "control_characters": "control characters",
    "long_words": "words without end",
}
"""Repairs, each with what is counted."""


@dataclass
class Faults:
    """The policy and the counts; readers of files fill them."""

    policy: str = "strict"
    """`strict`, `replace` or `skip`: see `DataConfig.errors`."""
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROPPED, 0))
    """Number for each reason in `DROPPED`."""
    repaired: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REPAIRED, 0))
    """Number for each repair in `REPAIRED`."""

    @property
    def are_errors(self) -> bool:
        """Whether a line that cannot be read ends the preparation."""
        return self.policy == "strict"


def in_words(counts: dict[str, int], meanings: dict[str, str]) -> str:
    """The counts that are not 0, as "3 duplicate documents, 1 documents without text"; else "nothing"."""
    return ", ".join(f"{number:,} {meanings[reason]}" for reason, number in counts.items() if number) or "nothing"
