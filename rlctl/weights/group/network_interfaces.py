"""This machine's network interfaces, and whether a peer is reachable over an interface.

A host with several interfaces or a wrong default route often fails only when many processes wait for each other. The
probe detects the failure earlier, and reports its source and destination.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path

from rlctl.contract.errors import Reason

_PAUSE_S = 0.05

_SIOCGIFADDR = 0x8915
"""Linux, netdevice(7): the IPv4 address of an interface."""


def probe(peer: tuple[str, int], interface_host: str, *, timeout_s: float, patient_s: float | None = None) -> None:
    """Connect to ``peer`` from ``interface_host``, an address or name of this machine, and disconnect.

    A refusing peer is retried for ``patient_s``, by default until the timeout: the peer may be about to listen. Raises
    UNREACHABLE with source, source interface, destination, and the interface of the system's route if different.
    """
    host, port = peer
    deadline = time.monotonic() + timeout_s
    patient_until = deadline if patient_s is None else min(deadline, time.monotonic() + patient_s)
    try:
        family, _, _, _, source = socket.getaddrinfo(interface_host, 0, type=socket.SOCK_STREAM)[0]
        destination = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)[0][4]
        while True:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(max(deadline - time.monotonic(), _PAUSE_S))
                connection.bind((source[0], 0))
                try:
                    connection.connect(destination)
                except ConnectionRefusedError:
                    if time.monotonic() + _PAUSE_S > patient_until:
                        raise
                else:
                    return
            time.sleep(_PAUSE_S)
    except OSError as error:
        name = interface_of(interface_host) or "unknown"
        route = interface_of(address_towards(host)) or name
        route_phrase = "" if route == name else f", by a route over {route}"
        raise Reason.UNREACHABLE.error(
            f"{host}:{port} cannot be reached from {interface_host} (interface {name}){route_phrase}: {error}",
            field="master_address",
            next_step="Give the trainer's publisher, and the stage's node, addresses on a network that both are on.",
            metadata={"source": interface_host, "interface": name, "destination": f"{host}:{port}", "route": route},
        ) from error


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host: the host's own address if the host is this machine.

    ``host``: a name or an address. Returns ``host`` itself without a route.
    """
    try:
        family, _, _, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(destination)  # looks up the route and sends nothing
            return str(asking.getsockname()[0])
    except OSError:
        return host


def address_of(node: str) -> str:
    """Return the IP address of a host name or address. Raises ENGINE_FAILED if the name does not resolve."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(node))
    try:
        return str(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise Reason.ENGINE_FAILED.error(f"host name {node!r} does not resolve: {error}") from error


def interface_of(host: str) -> str:
    """Return the interface with an address of this machine; "" if no interface has the address, or outside Linux."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, 0)[0][4][0])
    except (OSError, ValueError):
        return ""
    if address.version == 6:
        return _ipv6_interfaces().get(address.packed.hex(), "")
    return next((name for name, ipv4 in _ipv4_addresses().items() if ipv4 == str(address)), "")


def own_address(host: str) -> str:
    """Return an address or name of this machine without the brackets of an IPv6 address.

    Raises FIELD_INVALID if this machine cannot bind the address.
    """
    plain = host.removeprefix("[").removesuffix("]")
    try:
        family, _, _, _, address = socket.getaddrinfo(plain, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        raise Reason.FIELD_INVALID.error(
            f"{host!r} is no address or name of this machine: {error}",
            field="host",
            next_step="Give an address of this machine without a port, or the network that it is in.",
        ) from error
    return plain


def address_on(interface: str, *, field: str = "interface") -> str:
    """Return this machine's address on an interface ("eth0") or in a network ("10.0.0.0/8"); Linux only.

    Raises FIELD_INVALID with ``field`` and the existing addresses if no address matches.
    """
    addresses = {str(ipaddress.IPv6Address(bytes.fromhex(raw))): name for raw, name in _ipv6_interfaces().items()}
    interfaces = {**{address: name for name, address in _ipv4_addresses().items()}, **addresses}
    network = None
    if "/" in interface:
        try:
            network = ipaddress.ip_network(interface, strict=False)
        except ValueError as error:
            raise Reason.FIELD_INVALID.error(f"{interface} is no network: {error}", field=field) from None
    for address, name in interfaces.items():
        # An address of the other family is in no network of this family.
        if name == interface if network is None else ipaddress.ip_address(address) in network:
            return address
    existing = ", ".join(f"{name} {address}" for address, name in interfaces.items())
    raise Reason.FIELD_INVALID.error(f"this machine has no address on {interface}; there are: {existing}", field=field)


def _ipv4_addresses() -> dict[str, str]:
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = str(ipaddress.IPv4Address(answer[20:24]))
    return addresses


def _ipv6_interfaces() -> dict[str, str]:
    """Return the interface by address in hex, from /proc (proc(5), net/if_inet6)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    return {fields[0]: fields[5] for fields in map(str.split, lines)}
