"""What joulery writes into a job's AdminComment and Comment: the mark of a hold, and why the held job waits.

AdminComment is joulery's. Comment is the owner's: joulery's words stand behind the owner's, in a form by which they are
found and removed again, and the owner's stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from joulery.adapters.clusters.slurm_records import COMMENT_TAG, HELD_TAG, SlurmRecord

_REASON = re.compile(r" ?\[joulery: [^\]]*\]")
_MOST_CHARACTERS = 240
"""Less than what is read of AdminComment."""
_MOST_OWN_CHARACTERS = 700
"""A longer text of an owner gets none of ours: what is read of Comment ends at 1024 characters."""


def owner_words(comment: str) -> str:
    """A comment without joulery's words."""
    return " ".join(word for word in _REASON.sub("", comment).split(" ") if word != COMMENT_TAG).strip()


def has_reason(comment: str) -> bool:
    """Whether joulery wrote into a comment why the job waits."""
    return _REASON.search(comment) is not None


def with_reason(comment: str, text: str) -> str:
    """The comment with why the job waits behind all else: ``… [joulery: rank 2 of 5: …]``."""
    said = text.replace("[", "(").replace("]", ")")[:_MOST_CHARACTERS].rstrip()
    return f"{_REASON.sub('', comment).rstrip()} [joulery: {said}]".lstrip()


def component(record: SlurmRecord) -> str:
    """How ``scontrol`` names this component of a heterogeneous job alone; the job's address for other jobs."""
    return f"{record.het}+{record.het_offset}" if record.het else record.address


def reason_updates(record: SlurmRecord, text: str, *, in_comment: bool) -> Iterator[tuple[str, str, str]]:
    """Commands by name, with job and text, that bring up to date what a held job's comments say.

    Args:
        record: The job as it is now; nothing is written to one without joulery's mark.
        text: Why it waits.
        in_comment: Whether its owner's Comment says so, too.
    """
    if HELD_TAG in record.admin_comment:
        wanted = f"{HELD_TAG} {text}"[:_MOST_CHARACTERS].rstrip()
        if record.admin_comment != wanted:
            yield "mark", record.address, wanted
    if in_comment and record.tagged and len(owner_words(record.comment)) <= _MOST_OWN_CHARACTERS:
        wanted = with_reason(record.comment, text)
        if record.comment != wanted:
            yield "mark by comment", component(record), wanted
