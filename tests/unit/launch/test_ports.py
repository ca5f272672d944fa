"""Ports that are given out are free."""

import socket

import pytest

from nemo_style_rlhf.launch import ports
from nemo_style_rlhf.launch.ports import PORTS, free_ports


def test_they_differ_and_lie_in_the_range():
    found = free_ports(3)
    assert len(set(found)) == 3 and all(port in PORTS for port in found)


def test_one_in_use_is_passed_over_whatever_address_it_listens_on(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    with socket.create_server(("127.0.0.2", port)), pytest.raises(OSError, match=f"no 1 free ports from {port}"):
        free_ports(1)
    assert free_ports(1) == [port]
