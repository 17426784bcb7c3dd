"""Origins of programs in HLO text, for the tests that write their programs so."""

from joulery.adapters.tracers.xla.origins import Origin, programs_in_text


def origins_in_text(program: str) -> dict[tuple[str, str], Origin]:
    """Origins by (module, instruction)."""
    return {key: origin for each in programs_in_text(program) for key, origin in each.origins().items()}
