"""Ports of tests: no two of them get the same."""

import socket
import subprocess
import sys

from tests import ports
from tests.ports import free_port, free_ports

ASK = "from tests.ports import free_ports; print(*free_ports(400), flush=True); input()"


def test_each_port_is_given_once_to_one_process():
    mine = [*free_ports(400), free_port()]
    with subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = list(map(int, other.stdout.readline().split()))
        other.communicate("\n")
    assert other.returncode == 0 and len(theirs) == 400
    assert len({*mine, *theirs}) == 801
    assert mine[:400] == list(range(mine[0], mine[0] + 400))


def test_a_port_that_a_program_has_is_not_given():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        held = ports._held.pop(port)
        assert not ports._take(port)
        ports._held[port] = held
