"""The host's side of a node's network: its address, its rules, forwarding, and Docker's consent.

Runs in the threads kept for network work (see slots.py); `forward_blockers` and `usable` may be
called from anywhere.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from agentenv.network import namespace, netlink, nft
from agentenv.network.denied import Denied
from agentenv.network.forwarding import IPV4, IPV6, Forwarding, ipv6_uplinks
from agentenv.network.netlink import Rtnetlink
from agentenv.network.node import NodeIdentity, NodeRegistry
from agentenv.network.opened import Opened

DEFAULT_MTU = 1500
_LOOPBACK = 1


def in_use(identity: NodeIdentity, host: Rtnetlink) -> str | None:
    """Why an identity cannot be taken on this host, or None: addresses, routes or names that it needs."""
    for _, address, network in host.addresses():
        if network.overlaps(identity.block):
            return f"the host has the address {address} in {network}"
    for route in host.routes():
        if route.destination.prefixlen and route.destination.overlaps(identity.block):
            return f"the host has a route to {route.destination}"
    left = left_behind(identity, host)
    if left:
        return f"{len(left)} namespaces or links named {identity.name}-… exist"
    return None


def left_behind(identity: NodeIdentity, host: Rtnetlink) -> set[str]:
    """Names of namespaces and links on the host that begin like this node's slots."""
    start = f"{identity.name}-"
    names = {link.name for link in host.links()}
    if namespace.NAMESPACES.is_dir():
        names.update(file.name for file in namespace.NAMESPACES.iterdir())
    return {name for name in names if name.startswith(start)}


def uplinks(host: Rtnetlink) -> list[netlink.Link]:
    """The interfaces through which the host routes to anywhere, slots aside."""
    devices = {route.device for route in host.routes()}
    return [
        link
        for link in host.links()
        if link.index in devices and link.index != _LOOPBACK and not link.name.startswith("aenv")
    ]


def uplink_mtu(host: Rtnetlink) -> int:
    """The smallest MTU on the ways out, so that nothing needs fragmenting there."""
    defaults = {route.device for route in host.routes() if route.destination.prefixlen == 0}
    return min((link.mtu for link in host.links() if link.index in defaults), default=DEFAULT_MTU)


class HostSide:
    """Sets up and takes down what all slots of a node share on the host. Both can be repeated."""

    def __init__(
        self,
        identity: NodeIdentity,
        registry: NodeRegistry,
        denied: Denied,
        opened: Sequence[Opened] = (),
        *,
        ipv6: bool = False,
    ) -> None:
        self._identity = identity
        self._opened = opened
        self._denied = denied
        self._ipv6 = ipv6
        self._forwarding = Forwarding(registry, IPV4)
        self._forwarding6 = Forwarding(registry, IPV6)
        self._docker = DockerConsent(identity)

    def set_up(self, host: Rtnetlink) -> None:
        """Address, rules, then forwarding: nothing is forwarded before the rules hold."""
        address = netlink.add_address(_LOOPBACK, self._identity.address, 32, scope=netlink.SCOPE_LINK)
        # The host reaches guests from this address, and the resolver listens on it. On the
        # loopback interface, since the dummy kind is not in every kernel.
        host.apply(netlink.set_up(_LOOPBACK), address)
        nft.apply(nft.node_rules(self._identity, self._denied, self._opened, ipv6=self._ipv6))
        self._docker.give()
        self.refresh(host)

    def refresh(self, host: Rtnetlink) -> None:
        """See to it that replies from every way out are forwarded; cheap when nothing changed."""
        self._forwarding.switch_on([link.name for link in uplinks(host)])
        if self._ipv6:
            self._forwarding6.switch_on(ipv6_uplinks())

    def take_down(self, host: Rtnetlink) -> None:
        """Remove the node's own; `restore_shared` is for the last node to call."""
        with ExitStack() as stack:  # each is tried, whatever becomes of the others
            stack.callback(self._withdraw_address, host)
            stack.callback(nft.apply, nft.delete_node_rules(self._identity))
            stack.callback(self._docker.withdraw)

    def restore_shared(self) -> None:
        """Put forwarding back as it was found, with the registry's lock held."""
        self._forwarding.restore()
        self._forwarding6.restore()

    def _withdraw_address(self, host: Rtnetlink) -> None:
        try:
            host.apply(netlink.delete_address(_LOOPBACK, self._identity.address, 32))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise


class DockerConsent:
    """Rules in Docker's DOCKER-USER chain that let a node's packets pass.

    Where Docker runs, the policy of iptables' FORWARD chain is to drop, and an accept in a table
    of ours does not override that. Made with `iptables`, the program that owns the chain, so that
    both of its variants work; without the chain there is nothing to do.
    """

    def __init__(self, identity: NodeIdentity) -> None:
        links = f"{identity.name}-+"
        mark = ["-m", "comment", "--comment", identity.name, "-j", "ACCEPT"]
        replies = ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED"]
        self._rules = [["-i", links, *mark], ["-o", links, *replies, *mark]]

    def give(self) -> None:
        """Insert the rules where they are not yet."""
        if not self._has_chain():
            return
        for rule in self._rules:
            if not self._iptables("-C", "DOCKER-USER", *rule):
                self._iptables("-I", "DOCKER-USER", *rule)

    def withdraw(self) -> None:
        """Remove the rules where they are."""
        if not self._has_chain():
            return
        for rule in self._rules:
            while self._iptables("-D", "DOCKER-USER", *rule):
                pass

    def _has_chain(self) -> bool:
        return shutil.which("iptables") is not None and self._iptables("-L", "DOCKER-USER", "-n")

    @staticmethod
    def _iptables(*arguments: str) -> bool:
        command = ["iptables", "-w", "5", *arguments]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def forward_blockers() -> list[str]:
    """Rules of others that keep sandboxes from the network, one sentence each; for `aenv doctor`.

    Raises:
        HostFault, HostIncapable: the rules cannot be read.
    """
    return blockers(nft.ruleset())


def blockers(ruleset: dict[str, Any]) -> list[str]:
    """The blockers in a rule set as `nft -j list ruleset` prints it.

    A chain on the forward hook blocks when its policy is to drop or its last rule drops or
    rejects everything. Docker's does not, since the node adds itself to DOCKER-USER. On the
    input hook, such a chain would keep guests from the resolver.
    """
    objects = ruleset.get("nftables", [])
    chains = [item["chain"] for item in objects if "chain" in item]
    rules = [item["rule"] for item in objects if "rule" in item]
    docker = {(chain["family"], chain["table"]) for chain in chains if chain["name"] == "DOCKER-USER"}
    found = []
    for chain in chains:
        if chain.get("hook") not in ("forward", "input") or chain["family"] not in ("ip", "inet"):
            continue
        if chain["table"].startswith("aenv") and chain["table"] != "aenv":
            continue
        if chain["hook"] == "forward" and (chain["family"], chain["table"]) in docker:
            continue
        how = _how_it_ends(chain, rules)
        if how is not None:
            where = f"{chain['family']} {chain['table']} {chain['name']}"
            what = "packets of sandboxes" if chain["hook"] == "forward" else "guests' name lookups"
            found.append(f"the nftables chain {where} {how}: {what} must be accepted in it")
    return found


def _how_it_ends(chain: dict[str, Any], rules: Sequence[dict[str, Any]]) -> str | None:
    if chain.get("policy") == "drop":
        return "has the policy to drop"
    key = (chain["family"], chain["table"], chain["name"])
    own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == key]
    if own:
        verdicts = [part for part in own[-1]["expr"] if "counter" not in part]
        if len(verdicts) == 1 and ("drop" in verdicts[0] or "reject" in verdicts[0]):
            return f"ends in a rule to {next(iter(verdicts[0]))} everything"
    return None
