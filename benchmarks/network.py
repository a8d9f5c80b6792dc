"""A network of its own for a benchmark: processes in namespaces, joined by a bridge over links of a set rate.

Nothing of the machine's own interfaces is touched: all is made in a user namespace and gone with it. Linux, with the
rights that `unshare --user --net` needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

INSIDE = "--inside-a-namespace"


def available() -> bool:
    """Whether such a network can be made here."""
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "tc", "mount"))
    probe = ["unshare", "-Urnm", "sh", "-c", "mount -t tmpfs tmpfs /run && ip link add bridge0 type bridge"]
    return tools and subprocess.run(probe, capture_output=True, check=False).returncode == 0


def enter(module: str, argv: Sequence[str]) -> int | None:
    """Run the module once more inside a namespace, where it is not there yet; its exit code, or None inside."""
    if INSIDE in argv:
        return None
    if not available():
        print("this machine allows no network namespaces to ordinary users: nothing measured", file=sys.stderr)
        return 2
    command = ["unshare", "-Urnm", "--kill-child", sys.executable, "-m", module, *argv, INSIDE]
    return subprocess.run(command, check=False).returncode


class Network:
    """``hosts`` namespaces with addresses 10.9.0.1, 10.9.0.2, ...; what each sends is held to ``rate`` (20mbit)."""

    def __init__(self, hosts: int, *, rate: str | None = None) -> None:
        self.hosts = hosts
        if not os.path.ismount("/run") or not Path("/run/isoloco-network").exists():
            _run("mount", "-t", "tmpfs", "tmpfs", "/run")
            Path("/run/isoloco-network").touch()
        _run("ip", "link", "add", "bridge0", "type", "bridge")
        _run("ip", "link", "set", "bridge0", "up")
        for i in range(hosts):
            host, inner, outer = self._name(i), f"inner{i}", f"outer{i}"
            _run("ip", "netns", "add", host)
            _run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
            _run("ip", "link", "set", outer, "master", "bridge0", "up")
            _run("ip", "link", "set", inner, "netns", host)
            _run(*self._at(i), "ip", "addr", "add", f"10.9.0.{i + 1}/24", "dev", inner)
            _run(*self._at(i), "ip", "link", "set", inner, "up")
            _run(*self._at(i), "ip", "link", "set", "lo", "up")
            if rate:
                limit = ("rate", rate, "burst", "64kb", "latency", "400ms")
                _run(*self._at(i), "tc", "qdisc", "add", "dev", inner, "root", "tbf", *limit)

    def _name(self, host: int) -> str:
        return f"host{host}"

    def _at(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(host)]

    def start(
        self, host: int, argv: Sequence[str], output: TextIO | None = None, *, port: int = 29400
    ) -> subprocess.Popen[str]:
        """A process on a host, set up as torchrun does for one process on each."""
        settings = {
            "MASTER_ADDR": "10.9.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.hosts), "RANK": str(host),
            "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": f"inner{host}", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return subprocess.Popen(
            [*self._at(host), *argv], env={**os.environ, **settings}, text=True, stdout=output, stderr=output
        )

    def counted(self, host: int) -> tuple[int, int]:
        """Bytes that the kernel counted on the host's interface: sent, received."""
        table = subprocess.run([*self._at(host), "cat", "/proc/net/dev"], capture_output=True, text=True, check=True)
        line = next(line for line in table.stdout.splitlines() if line.strip().startswith(f"inner{host}:"))
        fields = line.partition(":")[2].split()
        return int(fields[8]), int(fields[0])

    def close(self) -> None:
        for i in range(self.hosts):
            _run("ip", "link", "delete", f"outer{i}")  # a namespace lets go of its end only some time after it is gone
            _run("ip", "netns", "delete", self._name(i))
        _run("ip", "link", "delete", "bridge0")


@contextlib.contextmanager
def network(hosts: int, *, rate: str | None = None) -> Iterator[Network]:
    made = Network(hosts, rate=rate)
    try:
        yield made
    finally:
        made.close()


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")
