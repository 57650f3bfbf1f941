"""Two workers as in two containers of two machines: a network and an IPC namespace each.

One is in the namespaces of the test, the other one in its own; a veth pair joins them, which UCX
then reads through with TCP. Needs to be root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from conversation import answer
from server import flags, wait_until
from storm import Faults, acquainted, at_rest, load

pytestmark = pytest.mark.slow

#: Addresses that are set aside for tests of networks.
NEAR, FAR = "198.18.77.1", "198.18.77.2"
OPTIONS = ("--xavier-gpu-budget", "16MiB", "--xavier-cpu-budget", "64MiB", "--xavier-min-fetch")
ENGINE = {"num_gpu_blocks_override": 136, "xavier_self_check": 1}
BLOCKS = 2000 // 32
PROMPTS = 3
LOAD_PROMPTS = 24
CUT_SECONDS = 4.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespace() -> Iterator[tuple[str, str]]:
    """Name of a network namespace with the address ``FAR``, and of our end of the cable to it."""
    name = f"xavier{os.getpid()}"
    near, far = f"xa{os.getpid()}", f"xb{os.getpid()}"
    try:
        lay_cable(name, near, far)
    except (OSError, subprocess.CalledProcessError) as error:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", name)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    yield name, near
    ip("netns", "delete", name)  # and with it the cable


def lay_cable(name: str, near: str, far: str) -> None:
    inside = ("netns", "exec", name, "ip")
    ip("netns", "add", name)
    ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
    ip("addr", "add", f"{NEAR}/30", "dev", near)
    ip("link", "set", near, "up")
    ip(*inside, "addr", "add", f"{FAR}/30", "dev", far)
    ip(*inside, "link", "set", far, "up")
    ip(*inside, "link", "set", "lo", "up")
    ip(*inside, "route", "add", "default", "via", NEAR)


@pytest.fixture(scope="module")
def cluster(
    namespace: tuple[str, str], tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Cluster]:
    """Two replicas of one model, ready and acquainted."""
    inside = ("ip", "netns", "exec", namespace[0], "unshare", "--ipc")
    cluster = Cluster(
        tmp_path_factory.mktemp("apart"),
        {},
        (NEAR, FAR),
        supervisor_host=NEAR,
        inside={FAR: inside},
        XOSCAR_AUTH_KEY="a key of this test",
    )
    try:
        options = ("--replica", "2", "--enable-xavier-gpu", *OPTIONS, "64", *flags(ENGINE))
        launched = cluster.launch("apart", tiny_model, *options)
        assert launched.returncode == 0, launched.stderr
        cluster.wait_ready("apart")
        wait_until(lambda: acquainted(look(cluster)), 120, lambda: str(look(cluster)))
        yield cluster
        cluster.terminate("apart")
    finally:
        left = cluster.stop()
    assert left == []


def look(cluster: Cluster) -> list[dict[str, Any]]:
    """Nothing while the supervisor does not answer: where Xinference itself connects to a worker
    that is cut off, xoscar holds up its calls to everybody."""
    answered = cluster.client.get("/v1/xavier/apart")
    if answered.status_code == 503:
        return []
    answered.raise_for_status()
    found: list[dict[str, Any]] = answered.json()["replicas"]
    return found


def requests(cluster: Cluster) -> int:
    return sum(each["stats"]["counters"]["requests"] for each in look(cluster))


def carried(interface: str) -> int:
    """Bytes that an interface has received and sent."""
    counts = Path(f"/sys/class/net/{interface}/statistics")
    return sum(int((counts / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def cut(interface: str) -> None:
    """What our side sends to the far one gets lost for a while, without a word."""
    ip("neigh", "replace", FAR, "lladdr", "02:00:00:00:00:01", "dev", interface, "nud", "permanent")
    try:
        time.sleep(CUT_SECONDS)
    finally:
        ip("neigh", "delete", FAR, "dev", interface)


def rested(cluster: Cluster) -> bool:
    found = look(cluster)
    return acquainted(found) and all(at_rest(replica["stats"]) for replica in found)


def test_replicas_in_two_namespaces_share(cluster: Cluster, namespace: tuple[str, str]) -> None:
    assert {str(each["address"]).rpartition(":")[0] for each in look(cluster)} == {NEAR, FAR}

    before = carried(namespace[1])
    for number in range(PROMPTS):
        said = set()
        for _ in range(2):  # Xinference gives requests to its replicas in turns
            asked = requests(cluster)
            said.add(answer(cluster, "apart", number))
            wait_until(lambda n=asked: requests(cluster) > n, 30, cluster.tail)
        assert len(said) == 1
    stats = [each["stats"] for each in look(cluster)]
    for each in stats:
        assert each["sharing"]["fetch_failures"] == {}
        assert each["counters"]["mismatches"] == each["counters"]["failed_copies"] == 0
    blocks = sum(each["counters"]["hits_peer_blocks"] for each in stats)
    assert blocks == PROMPTS * BLOCKS
    # Through the cable, not through memory.
    assert carried(namespace[1]) - before >= blocks * stats[0]["row_bytes"]
    wait_until(lambda: rested(cluster), 30, lambda: str(look(cluster)))


def test_no_request_fails_while_the_cable_is_cut(
    cluster: Cluster, namespace: tuple[str, str]
) -> None:
    """Reads time out and land later; neither side reaches the other's actors."""

    def cut_cable() -> None:
        cut(namespace[1])

    faults = Faults([cut_cable])
    try:
        answers = load(cluster, "apart", faults, 60, LOAD_PROMPTS)
    finally:
        faults.stop()
    assert len(answers) >= 60
    wait_until(lambda: rested(cluster), 60, lambda: str(look(cluster)))
    print(f"{len(answers)} requests; at rest after {time.monotonic() - faults.ended:.1f} s")
    for each in look(cluster):
        print(each["stats"]["counters"], each["stats"]["sharing"])
        assert each["stats"]["counters"]["mismatches"] == 0
