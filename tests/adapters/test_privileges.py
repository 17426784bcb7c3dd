"""Who may set a GPU: the capability decides, not the user's number."""

from pathlib import Path

import pytest

from joulery.adapters.privileges import may_administer

ALL, WITHOUT = "000001ffffffffff", "000001ffffdfffff"
MACHINE, ROOTLESS = "user:[4026531837]", "user:[4026532601]"


@pytest.mark.parametrize(
    ("effective", "namespace", "may"),
    [
        (ALL, MACHINE, True),
        ("0000000000200000", MACHINE, True),  # any user, that one capability
        (WITHOUT, MACHINE, False),  # root of an ordinary container
        (ALL, ROOTLESS, False),  # root of a rootless container
        ("0000000000000000", MACHINE, False),
    ],
)
def test_the_capability_in_the_machines_own_user_namespace_decides(
    tmp_path: Path, effective: str, namespace: str, may: bool
) -> None:
    (tmp_path / "status").write_text(f"Name:\tjoulery\nUid:\t0\t0\t0\t0\nCapEff:\t{effective}\n")
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns/user").symlink_to(namespace)
    assert may_administer(tmp_path) is may


def test_without_proc_it_is_refused(tmp_path: Path) -> None:
    assert not may_administer(tmp_path)
