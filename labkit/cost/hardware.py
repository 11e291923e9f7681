"""Hardware by name: `cluster("DGX H100", num_nodes=2)`, `cluster("T4", per_node=4)`, `link("NVLink 4")`.

The figures and their sources stand in `devices`, `links` and `nodes`; what they mean, in `parts`. Any part may be
given as a record instead of a name. Left out: prices and power.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.cost import parts
from labkit.cost.devices import DEVICES
from labkit.cost.links import LINKS
from labkit.cost.nodes import NODES
from labkit.cost.parts import Cluster, Device, Link, Node


def device(name: str | Device) -> Device:
    """The device of that name. ValueError, with the names that are known, for any other."""
    return name if isinstance(name, Device) else parts.named("device", name, DEVICES)


def link(name: str | Link) -> Link:
    """The link of that name. ValueError, with the names that are known, for any other."""
    return name if isinstance(name, Link) else parts.named("link", name, LINKS)


def node(name: str | Node) -> Node:
    """The node of that name. ValueError, with the names that are known, for any other."""
    return name if isinstance(name, Node) else parts.named("node", name, NODES)


def cluster(
    name: str | Node | Device,
    num_nodes: int = 1,
    *,
    per_node: int | None = None,
    intra: str | Link | None = None,
    nic: str | Link | None = None,
    num_nics: int | None = None,
) -> Cluster:
    """A cluster of nodes, or of one device `per_node` times in each node; further parts replace the node's own.

    intra: the link inside a node, for a device by default its NVLink, else its link to the host. nic: one network
    card, of which a node has num_nics (a node of a device: one). ValueError for a name that is not known, with those
    that are.
    """
    box = _node(name)
    if per_node is not None:
        kept = min(box.num_nics, per_node) if num_nics is None else num_nics
        called = box.device.name if per_node == 1 else f"{per_node}x{box.device.name}"
        box = replace(box, name=called, count=per_node, num_nics=kept)
    if nic is not None:
        box = replace(box, name=f"{box.name}, {link(nic).name}", nic=link(nic), num_nics=num_nics or box.num_nics or 1)
    elif num_nics is not None:
        box = replace(box, num_nics=num_nics)
    if intra is not None:
        box = replace(box, name=f"{box.name}, {link(intra).name}", intra=link(intra))
    return Cluster(box, num_nodes)


def _node(name: str | Node | Device) -> Node:
    if isinstance(name, Node):
        return name
    known = (*NODES, *DEVICES)
    found = name if isinstance(name, Device) else parts.named("node or device", name, known)
    if isinstance(found, Node):
        return found
    wires = found.nvlink or found.host
    if wires is None:
        raise ValueError(f"{found.name} has no link of its own: give intra=")
    return Node(found.name, found, 1, wires, source=found.source)
