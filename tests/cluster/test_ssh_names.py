"""Tests of what can be said about hosts before any of them is reached."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

import ortlab
from ortlab.cluster import checks
from ortlab.cluster import link as of_links
from ortlab.cluster.hosts import Hosts
from ortlab.cluster.ssh import Destination
from tests.support.typed_magics import Typist


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a", ["--", "a"]),
        ("me@node-1.lab", ["--", "me@node-1.lab"]),
        ("node:2222", ["-p", "2222", "--", "node"]),
        ("me@10.0.0.1:22", ["-p", "22", "--", "me@10.0.0.1"]),
    ],
)
def test_names_are_those_of_openssh(name: str, words: list[str]) -> None:
    assert Destination(name).words == words


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "-l@a", "a b", "a;b", "a:b", "@a", "a@", "$(a)", "a/b", "a:"]
)
def test_what_is_no_name_never_reaches_ssh(name: str) -> None:
    with pytest.raises(ValueError, match="is not a host name; write host, user@host or host:port"):
        Destination(name)


def test_the_number_follows_from_the_hosts() -> None:
    assert Hosts.chosen("a,b", None, None).count == 2
    assert Hosts.chosen("a, b,", None, 2) == Hosts(("a", "b"), 2)
    assert Hosts.chosen(["a", "b"], 6, None).per_host == 3
    assert Hosts.chosen("a,b", 4, 2).count == 4


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"names": " ,"}, "hosts names no host"),
        ({"names": "a,a"}, "hosts has a twice; use per_host"),
        ({"count": 3}, "3 workers cannot be 1 on each of 2 hosts; start 2, or change per_host"),
        ({"count": 5, "per_host": 2}, "5 workers cannot be 2 on each of 2 hosts; start 4"),
        ({"per_host": 0}, "per_host=0 must be at least 1"),
        ({"address": "0.0.0.0"}, "would open the controller to every network"),
        ({"address": "here"}, "'here' is not an IPv4 address"),
        ({"address": "192.0.2.77"}, "'192.0.2.77' is not an address of this machine"),
    ],
)
def test_impossible_choices_are_refused(chosen: dict[str, Any], message: str) -> None:
    given = {"names": "a,b", "count": None, "per_host": None} | chosen
    with pytest.raises(ValueError, match=re.escape(message)):
        Hosts.chosen(**given)


def test_one_address_serves_all_hosts() -> None:
    def common(**sources: str) -> str:
        known = {host: source for host, source in sources.items() if source}
        return checks.common_address(known, {}, list(sources))

    assert common(a="10.0.0.1", b="10.0.0.1") == "10.0.0.1"
    assert common(a="10.0.0.1", localhost="127.0.0.1") == "10.0.0.1"
    assert common(localhost="127.0.0.1") == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"different addresses: a by 10\.0\.0\.1, b by 10\.1"):
        common(a="10.0.0.1", b="10.1.0.1")
    with pytest.raises(
        RuntimeError,
        match="by which behind can reach this machine is not known; name it, as in --address",
    ):
        common(behind="")


def test_the_magic_says_what_its_options_need(ip: Typist) -> None:
    assert "per_host=2 needs hosts, as in hosts=" in ip.refused("%ort workers 2 --per-host 2")
    assert "python='python3' needs hosts" in ip.refused("%ort workers --python python3")
    assert "takes a number, not 'x'" in ip.refused("%ort workers --hosts a --per-host x")
    assert "it takes no options" in ip.refused("%ort workers stop --hosts a")
    assert "a profile names its own hosts" in ip.refused("%ort workers 2 --hosts a --profile far")
    assert "3 workers cannot be 1 on each" in ip.refused("%ort workers 3 --hosts a,b")
    with pytest.raises(ValueError, match=r"^address='192\.0\.2\.1' needs hosts"):
        ortlab.workers(2, address="192.0.2.1")


def test_without_ssh_it_says_what_to_install(ip: Typist, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    error = ip.refused("%ort workers --hosts a")
    assert error == "ssh is not installed on this machine; install OpenSSH's client"


def test_an_ssh_that_ends_at_once_has_told_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its threads may start late, as on a busy machine."""

    class Late(of_links.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(0.3)

    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\necho 'Permission denied' >&2\nexit 255\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(of_links, "Thread", Late)
    link = of_links.Link(Destination("a").way(["python3"], 1), ("127.0.0.1", 1))
    until = time.monotonic() + 20
    assert link.greeting(until) is None
    assert time.monotonic() < until
    assert link.words == ["Permission denied"]
    of_links.end_all([link])
