"""Two hosts on one machine: network namespaces with a cable between them that can be cut or slowed down.

Each host has two addresses: one for the test's own HTTP requests, from the namespace that the tests run in, and one at the end of
the cable. Needs the right to make network namespaces and links, which root has.
"""

import os
import subprocess
import time
from typing import Self

import pytest

ADMIN_NET = "10.231"
DATA = ("10.232.0.1", "10.232.0.2")
DATA6 = ("fd32::1", "fd32::2")


class Host:
    """A network namespace, which ends with its only process."""

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self._process = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{self._process.pid}/ns/net") == own:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise PermissionError("no network namespace can be made here")
            time.sleep(0.01)
        self.admin, gateway = f"{ADMIN_NET}.{index}.2", f"{ADMIN_NET}.{index}.1"
        self.data, self.data6 = DATA[index - 1], DATA6[index - 1]
        link = f"mc2-{os.getpid() % 100_000}-{index}"
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "admin", "netns", str(self.pid))
        run("ip", "addr", "add", f"{gateway}/30", "dev", link)
        run("ip", "link", "set", link, "up")
        self.run("ip", "addr", "add", f"{self.admin}/30", "dev", "admin")
        for device in ("lo", "admin"):
            self.run("ip", "link", "set", device, "up")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def wrapper(self) -> list[str]:
        """What makes a command run on this host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, *command: str) -> None:
        run(*self.wrapper, *command)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class TwoHosts:
    """A context manager; the cable is whole at first."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        try:
            self.hosts = [Host("a", 1), Host("b", 2)]
            a, b = self.hosts
            a.run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(b.pid))
            for host in self.hosts:
                host.run("ip", "addr", "add", f"{host.data}/24", "dev", "cable")
                host.run("ip", "addr", "add", f"{host.data6}/64", "dev", "cable", "nodad")
                host.run("ip", "link", "set", "cable", "up")
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        for host in self.hosts:
            host.run("ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        for host in self.hosts:
            host.run("ip", "link", "set", "cable", "up")
            host.run("ip", "addr", "replace", f"{host.data6}/64", "dev", "cable", "nodad")

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
        for host in self.hosts:
            host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"{' '.join(command)}: {done.stderr.strip()}")


def two_hosts_or_skip() -> TwoHosts:
    try:
        return TwoHosts()
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
