"""Two hosts on one machine: network namespaces with a cable between them that can be cut or slowed down.

Each host has two addresses: one for HTTP requests from here, and one at the end of the cable, for all that prefill and
decode say to each other. Needs the right to make network namespaces and links, which root has.

    with TwoHosts() as hosts, Pair(model, hosts=hosts) as pair:
        ...
"""

import ipaddress
import os
import secrets
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

ADMIN_NET = "10.231"
"""Two networks of four addresses for each process that makes hosts, so that two may do so at the same time."""
DATA = ("10.232.0.1", "10.232.0.2")


class Host:
    """A network namespace, which ends with its only process."""

    def __init__(self, name: str, index: int, directory: Path) -> None:
        self.name = name
        self._directory = directory
        number = os.getpid() % 8192 * 2 + index - 1
        network = ipaddress.ip_network(f"{ADMIN_NET}.{number // 64}.{number % 64 * 4}/30")
        self._here, self.admin = map(str, network.hosts())
        self.data = DATA[index - 1]
        self._process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        try:
            self._connect(index)
        except BaseException:
            self.close()
            raise

    def _connect(self, index: int) -> None:
        """To where we are, once the namespace is there."""
        own = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self._process.pid}/ns/net").readlink() == own:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PermissionError("no network namespace can be made here")
            time.sleep(0.01)
        link = f"mc2-{os.getpid() % 100_000}-{index}"
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "admin", "netns", str(self.pid))
        run("ip", "addr", "add", f"{self._here}/30", "dev", link)
        run("ip", "link", "set", link, "up")
        self.run("ip", "addr", "add", f"{self.admin}/30", "dev", "admin")
        for device in ("lo", "admin"):
            self.run("ip", "link", "set", device, "up")

    @property
    def pid(self) -> int:
        """Of the process that keeps the namespace."""
        return self._process.pid

    @property
    def wrapper(self) -> list[str]:
        """What makes a command run on this host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    @property
    def settings(self) -> dict[str, Any]:
        """`kv_connector_extra_config` of an engine on this host."""
        return {
            "socket_dir": str(self._directory / self.name),
            "tcp_address": self.data,
            "tcp_secret_file": str(self._directory / "secret"),
        }

    def run(self, *command: str) -> None:
        """Run a command on this host, and wait for it."""
        run(*self.wrapper, *command)

    def close(self) -> None:
        """Give the namespace up."""
        self._process.kill()
        self._process.wait()


class TwoHosts:
    """A context manager; the cable is whole at first."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mc2-hosts-")
        self.hosts: list[Host] = []
        try:
            directory = Path(self._directory.name)
            secret = directory / "secret"
            secret.touch(mode=0o600)
            secret.write_text(secrets.token_hex(32))
            for index, name in enumerate("ab", 1):
                self.hosts.append(Host(name, index, directory))
            a, b = self.hosts
            a.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(b.pid))
            for host in self.hosts:
                host.run("ip", "addr", "add", f"{host.data}/24", "dev", "cable")
                host.run("ip", "link", "set", "cable", "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        for host in self.hosts:
            host.run("ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        """As before the cut."""
        for host in self.hosts:
            host.run("ip", "link", "set", "cable", "up")

    def slow_down(self, megabits_per_second: int) -> None:
        """Of what prefill's host sends; 0 for as fast as it goes."""
        device = self.hosts[0]
        subprocess.run(
            [*device.wrapper, "tc", "qdisc", "del", "dev", "cable", "root"], check=False, capture_output=True
        )
        if megabits_per_second:
            rate = f"{megabits_per_second}mbit"
            device.run(
                "tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", rate, "burst", "32k", "latency", "2s"
            )

    def close(self) -> None:
        """End both hosts, and with them whatever still runs there only by its sockets."""
        for host in self.hosts:
            host.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(*command: str) -> None:
    """Run a command, or raise `PermissionError` with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")
