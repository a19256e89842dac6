"""What a node is like now, as metrics: read on the event loop, in a moment, and written out elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from agentenv import __version__
from agentenv.network.netlink import Rtnetlink
from agentenv.proxy.plane import DataPlane
from agentenv.sandbox.admission import MIB, Need, host_free
from agentenv.sandbox.observing import Running
from agentenv.sandbox.service import Sandboxes
from agentenv.sandbox.transitions import State
from agentenv.vmm.usage import Usage, usages


class Value(NamedTuple):
    """One value of a metric, with the values of its labels."""

    labels: tuple[str, ...]
    value: float


class Family(NamedTuple):
    """A metric: its name without a unit's suffix for counters, what it means, and its values."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    values: list[Value]
    counts: bool = False


class Families(Collector):
    """Metrics whose values are known already."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            kind = CounterMetricFamily if family.counts else GaugeMetricFamily
            metric = kind(family.name, family.meaning, labels=family.labels)
            for labels, value in family.values:
                metric.add_metric(labels, value)
            yield metric


def one(name: str, meaning: str, value: float, *, counts: bool = False) -> Family:
    """A metric without labels."""
    return Family(name, meaning, (), [Value((), value)], counts)


def by(name: str, meaning: str, label: str, values: Mapping[str, float], *, counts: bool = False) -> Family:
    """A metric with one label."""
    return Family(name, meaning, (label,), [Value((key,), each) for key, each in values.items()], counts)


def program() -> Family:
    """Which program this is."""
    return by("aenv_info", "The program; its value is 1.", "version", {__version__: 1})


def of_service(service: Sandboxes) -> list[Family]:
    """Sandboxes, what is held ready, and what is promised."""
    states = Counter(str(state) for state in service.states())
    pool, admission = service.pool, service.admission
    free = host_free(service.home)
    return [
        by("aenv_sandboxes", "Sandboxes by state.", "state", {str(state): states[state] for state in State}),
        one("aenv_pool_machines", "Machines that are held ready.", pool.count),
        one("aenv_pool_machines_making", "Machines that are being made ready.", pool.making),
        by(
            "aenv_pool_takes",
            "Starts that a machine could have been ready for, by whether one was.",
            "result",
            {"ready": pool.given, "none": pool.missed},
            counts=True,
        ),
        one("aenv_slots_spare", "Network slots made ahead.", pool.slots_spare),
        one("aenv_slots_free", "Network slots that could still be made.", pool.slots_free),
        _room("aenv_node_capacity", "What the node may promise.", admission.budget.total),
        _room("aenv_node_promised", "What sandboxes and builds have been promised.", admission.promised),
        _room("aenv_node_lent", "What is held ready has of it, and gives back.", admission.lent),
        one("aenv_host_memory_available_bytes", "Memory that the host can give.", free.memory_mib * MIB),
        one("aenv_host_disk_free_bytes", "Space for data that the host can give.", free.disk_mib * MIB),
    ]


def _room(name: str, meaning: str, need: Need) -> Family:
    values = {
        "memory_bytes": need.memory_mib * MIB,
        "disk_bytes": need.disk_mib * MIB,
        "vcpus": need.vcpus,
        "sandboxes": need.sandboxes,
    }
    return by(name, meaning, "resource", values)


def of_plane(plane: DataPlane) -> list[Family]:
    """The data plane."""
    traffic = plane.traffic
    return [
        one("aenv_proxy_connections_open", "Connections of clients.", plane.connections_open),
        one("aenv_proxy_requests_under_way", "Requests to sandboxes under way.", plane.requests_under_way),
        one("aenv_proxy_connections", "Connections that clients made.", traffic.connections, counts=True),
        one("aenv_proxy_requests", "Requests to sandboxes.", traffic.requests, counts=True),
        by(
            "aenv_proxy_bytes",
            "Bytes of requests' bodies to sandboxes and of answers from them.",
            "direction",
            {"to_sandboxes": traffic.to_guests, "from_sandboxes": traffic.from_guests},
            counts=True,
        ),
        one("aenv_proxy_idle_upstreams", "Connections to guests that wait for a request.", len(plane.pool)),
    ]


class Moved(NamedTuple):
    """Bytes that the host got from a slot's interface, and that it sent there."""

    received: int
    sent: int


def read_links() -> dict[str, Moved]:
    """The traffic of all interfaces of this namespace, in one request."""
    with Rtnetlink() as host:
        return {name: Moved(*bytes_of) for name, bytes_of in host.traffic().items()}


def of_sandboxes(
    running: Iterable[Running],
    *,
    read: Callable[[Iterable[int]], Mapping[int, Usage]] = usages,
    links: Callable[[], Mapping[str, Moved]] = read_links,
) -> list[Family]:
    """What each sandbox that runs takes of its host. No guest is asked; to be called on a thread."""
    each = list(running)
    used, moved = read([one.pid for one in each]), links()
    known = [(one.sandbox.id, used[one.pid], moved.get(one.veth)) for one in each if one.pid in used]
    sizes = {one.sandbox.id: one.sandbox for one in each}

    def of(name: str, meaning: str, value: Callable[[Usage], float], *, counts: bool = False) -> Family:
        return by(name, meaning, "sandbox", {key: value(usage) for key, usage, _ in known}, counts=counts)

    network = {name: traffic for name, _, traffic in known if traffic is not None}
    return [
        of("aenv_sandbox_cpu_seconds", "Processor time of its machine.", lambda u: u.cpu_s, counts=True),
        of("aenv_sandbox_memory_resident_bytes", "Memory that its machine has.", lambda u: u.resident),
        of("aenv_sandbox_memory_own_bytes", "The part of it that nothing shares.", lambda u: u.own),
        of("aenv_sandbox_disk_read_bytes", "Bytes read from storage for it.", lambda u: u.read, counts=True),
        of("aenv_sandbox_disk_written_bytes", "Bytes written for it.", lambda u: u.written, counts=True),
        by(
            "aenv_sandbox_memory_limit_bytes",
            "Memory of its guest.",
            "sandbox",
            {name: sandbox.memory_mib * MIB for name, sandbox in sizes.items()},
        ),
        by("aenv_sandbox_vcpus", "Its processors.", "sandbox", {name: s.vcpus for name, s in sizes.items()}),
        by(
            "aenv_sandbox_network_received_bytes",
            "Bytes that it got from the network.",
            "sandbox",
            {name: traffic.sent for name, traffic in network.items()},
            counts=True,
        ),
        by(
            "aenv_sandbox_network_sent_bytes",
            "Bytes that it sent to the network.",
            "sandbox",
            {name: traffic.received for name, traffic in network.items()},
            counts=True,
        ),
    ]
