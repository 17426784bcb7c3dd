"""Matrix products of a recorded PyTorch program, which all belong to a module."""

import re
from collections import Counter

from joulery.domain.trace.tracing import TracedSession


def products(session: TracedSession) -> Counter[tuple[str, str]]:
    """Matrix products by (kind, phase); fails when one of them has no module."""
    trace, found = session.trace, Counter[tuple[str, str]]()
    for op, phase in zip(trace.op.tolist(), trace.phase.tolist(), strict=True):
        path, _, leaf = trace.ops[op].rpartition("/")
        kind = re.sub(r"_\d+$", "", leaf)
        if kind in ("mm", "addmm", "bmm"):
            assert not path.startswith("<"), trace.ops[op]
            found[kind, trace.phases[phase]] += 1
    return found
