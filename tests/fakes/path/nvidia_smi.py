"""``nvidia-smi``, as far as it cuts GPUs: tables, sentences and exit codes of the real one, on the boards in a file.

It works on the file of :mod:`tests.fakes.nvml`. JOULERY_FAKE_SMI_FAIL holds numbers of calls that fail (``,0,3,``),
counted in a file beside the boards.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.fakes.nvml import MENUS, STATE

_SLICES = {0: 1, 1: 2, 2: 3, 3: 4, 4: 7}
"""Slices of the compute instance profile of an id."""
IN_USE, NO_PERMISSION, NOT_FOUND, NO_ROOM = 19, 4, 6, 23


class Refused(Exception):  # noqa: N818 - what the driver says
    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


def main(arguments: list[str]) -> int:
    file = Path(os.environ[STATE])
    with file.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        state = json.load(opened)
        try:
            if _counted(file):
                raise Refused("injected failure", 255)
            if not (os.environ.get("JOULERY_FAKE_ROOT") or state["root"]):
                raise Refused("Insufficient Permissions", NO_PERMISSION)
            print(_answer(state, arguments))
        except Refused as error:
            print(error)
            return error.status
        opened.seek(0)
        opened.truncate()
        json.dump(state, opened)
    return 0


def _counted(file: Path) -> bool:
    calls = file.with_name("smi-calls")
    number = int(calls.read_text()) if calls.exists() else 0
    calls.write_text(str(number + 1))
    return f",{number}," in os.environ.get("JOULERY_FAKE_SMI_FAIL", "")


def _answer(state: dict[str, Any], arguments: list[str]) -> str:
    words = [word for word in arguments if word != "mig"]
    options = {words[at]: words[at + 1] if at + 1 < len(words) else "" for at in range(len(words))}
    index = int(options["-i"])
    board = state["boards"][index]
    if "-mig" in options:
        return _mode(board, int(options["-mig"]))
    if "-lgipp" in options:
        rows = MENUS[board["name"]]
        return "\n".join(
            f"GPU {index:2} Profile ID {row[1]:2} Placements: {{{','.join(map(str, row[5]))}}}:{row[6]}" for row in rows
        )
    if "-lgi" in options:
        return _gpu_instances(board, index)
    if "-lci" in options:
        return _compute_instances(board, index)
    if "-cgi" in options:
        return _create(board, index, *map(int, options["-cgi"].split(":")))
    found = next((one for one in board["instances"] if one["id"] == int(options["-gi"])), None)
    if found is None:
        raise Refused(f"Unable to find GPU instance ID {options['-gi']} on GPU {index}: Not Found", NOT_FOUND)
    if "-cci" in options:
        return _create_compute(board, index, found, int(options["-cci"]))
    return _destroy(board, index, found, compute="-dci" in options)


def _mode(board: dict[str, Any], mode: int) -> str:
    if mode == 0 and board["instances"]:
        raise Refused(f"Unable to disable MIG Mode for GPU {board['uuid']}: In use by another client", IN_USE)
    board["mig"][1] = mode
    word = "Enabled" if mode else "Disabled"
    if board["processes"] and mode != board["mig"][0]:
        state = "enable" if mode else "disable"
        return (
            f"Warning: MIG mode is in pending {state} state for GPU {board['uuid']}:In use by another client\n"
            "the GPU is currently being used by one or more other processes\nAll done."
        )
    board["mig"][0] = mode
    return f"{word} MIG Mode for GPU {board['uuid']}\nAll done."


def _row(board: dict[str, Any], profile: int) -> tuple[Any, ...]:
    return next(row for row in MENUS[board["name"]] if row[1] == profile)


def _gpu_instances(board: dict[str, Any], index: int) -> str:
    if not board["instances"]:
        raise Refused("No GPU instances found: Not Found", NOT_FOUND)
    rule = "+" + "-" * 55 + "+"
    rows = [
        f"| {index:3}  MIG {_row(board, one['profile'])[2]:<14} {one['profile']:3}  {one['id']:7}  "
        f"{one['start']:9}:{one['size']}     |\n{rule}"
        for one in board["instances"]
    ]
    title = "GPU instances:"
    columns = "GPU   Name             Profile  Instance   Placement"
    head = f"| {title:<54}|\n| {columns:<54}|"
    return "\n".join((rule, head, "|" + "=" * 55 + "|", *rows))


def _compute_instances(board: dict[str, Any], index: int) -> str:
    rows = [
        f"| {index:3} {one['id']:6}       MIG {_row(board, one['profile'])[2]:<14} {part['slices'] - 1:3}  "
        f"{part['id']:7}  {0:9}:{part['slices']}     |"
        for one in board["instances"]
        for part in one["compute"]
    ]
    if not rows:
        raise Refused("No compute instances found: Not Found", NOT_FOUND)
    return "\n".join(("| Compute instances:                                                 |", *rows))


def _create(board: dict[str, Any], index: int, profile: int, start: int) -> str:
    row = _row(board, profile)
    taken = {place for one in board["instances"] for place in range(one["start"], one["start"] + one["size"])}
    slices = sum(_row(board, one["profile"])[3] for one in board["instances"])
    if start not in row[5] or taken & set(range(start, start + row[6])) or slices + row[3] > 7:
        raise Refused(f"Unable to create a GPU instance on GPU {index:2}: Insufficient Resources", NO_ROOM)
    number = next(n for n in range(1, 99) if n not in {one["id"] for one in board["instances"]})
    made = {"id": number, "profile": profile, "start": start, "size": row[6], "compute": []}
    board["instances"].append(made)
    return (
        f"Successfully created GPU instance ID {number:2} on GPU {index:2} using profile MIG {row[2]} (ID {profile:2})"
    )


def _create_compute(board: dict[str, Any], index: int, found: dict[str, Any], profile: int) -> str:
    slices = _SLICES[profile]
    if slices + sum(part["slices"] for part in found["compute"]) > _row(board, found["profile"])[3]:
        raise Refused("Unable to create a compute instance: Insufficient Resources", NO_ROOM)
    number = len(found["compute"])
    found["compute"].append({"id": number, "slices": slices})
    return (
        f"Successfully created compute instance ID {number:2} on GPU {index:2} GPU instance ID {found['id']:2} "
        f"using profile ID {profile:2}"
    )


def _destroy(board: dict[str, Any], index: int, found: dict[str, Any], *, compute: bool) -> str:
    busy = any(one["gi"] == found["id"] for one in board["processes"])
    if busy or (not compute and found["compute"]):
        raise Refused(
            f"Unable to destroy GPU instance ID {found['id']:2} from GPU {index:2}: In use by another client", IN_USE
        )
    if compute:
        found["compute"] = []
        return f"Successfully destroyed compute instance ID  0 from GPU {index:2} GPU instance ID {found['id']:2}"
    board["instances"].remove(found)
    return f"Successfully destroyed GPU instance ID {found['id']:2} from GPU {index:2}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
