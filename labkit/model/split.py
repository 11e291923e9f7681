"""A backward cut in two: I computes the gradient of a stage's input, W the weights' later, and neither does the
other's work.

I runs backward along the nodes that lead to the input and keeps, at each node where weights come in, the gradients
that arrive there; W starts from these nodes and leaves the way to the input out (arXiv:2401.10241, section 1; torch's
own is `torch.distributed.pipelining._backward`, which is private). Left out: hooks on parameters, which see nothing of
W, and more than one input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node


@dataclass(eq=False)
class Piece:
    """Weights, and the nodes of the way to the input where they come in, with the gradients that arrived there."""

    nodes: list[Node]
    leaves: dict[Node, torch.nn.Parameter]
    arrived: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)


def backward_input(
    output: torch.Tensor, gradient: torch.Tensor | None, entry: torch.Tensor, parameters: Iterable[torch.nn.Parameter]
) -> tuple[torch.Tensor, list[Piece]]:
    """I: the gradient of `entry`, and what `backward_weights` needs.

    output: of the stage, or its loss; gradient: of it, None for a loss. entry: the stage's input, a leaf that requires
    grad. Raises ValueError when the output does not depend on it.
    """
    leaves = {leaf_node(each): each for each in parameters if each.requires_grad}
    pieces = _pieces(output.grad_fn, leaf_node(entry), leaves)
    handles = []
    for piece in pieces:
        for node in piece.nodes:
            handles.append(node.register_prehook(_keeper(piece, node)))
    try:
        (found,) = torch.autograd.grad(output, entry, gradient, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, pieces


def backward_weights(pieces: list[Piece]) -> None:
    """W: add the weights' gradients to their `.grad`. Once; the list is empty afterwards, and the graph can go."""
    while pieces:
        piece = pieces.pop()
        starts = [
            (GradientEdge(node, i), gradient)
            for node in piece.nodes
            for i, gradient in enumerate(piece.arrived.get(node, ()))
            if gradient is not None
        ]
        if not starts:
            continue
        # A weight that comes in at several nodes: what one of them hands down to another has arrived there already.
        clamps = [node.register_prehook(_clamp(piece.arrived[node])) for node in piece.nodes if node in piece.arrived]
        try:
            edges, gradients = zip(*starts, strict=True)
            ends = [GradientEdge(leaf, 0) for leaf in piece.leaves]
            found = torch.autograd.grad(edges, ends, gradients, retain_graph=True, allow_unused=True)
        finally:
            for clamp in clamps:
                clamp.remove()
        for parameter, gradient in zip(piece.leaves.values(), found, strict=True):
            if gradient is not None:
                accumulate(parameter, gradient)


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to `.grad`, as backward does."""
    if parameter.grad is None:
        parameter.grad = gradient.detach()
    else:
        parameter.grad += gradient


def leaf_node(tensor: torch.Tensor) -> Node:
    """The node at which a leaf's gradient ends up; the one that made it for another tensor."""
    return tensor.grad_fn or tensor.view_as(tensor).grad_fn.next_functions[0][0]


def _keeper(piece: Piece, node: Node):
    def keep(gradients):
        piece.arrived[node] = gradients

    return keep


def _clamp(arrived: tuple):
    return lambda gradients: arrived


def _pieces(root: Node | None, source: Node, leaves: dict[Node, torch.nn.Parameter]) -> list[Piece]:
    """Where weights come in on the way from root to source; nodes that share a weight make one piece."""
    leads: dict[Node, bool] = {}  # to the source
    below: dict[Node, set[Node]] = {}  # leaves that are reached without touching the way to the source
    for node in _children_first(root):
        children = _children(node)
        leads[node] = node is source or any(leads[child] for child in children)
        below[node] = {node} if node in leaves else set()
        for child in children:
            if not leads[child]:
                below[node] |= below[child]
    if root is None or not leads[root]:
        raise ValueError("the output of this stage does not depend on its input: no gradient can be handed on")
    pieces: list[tuple[list[Node], set[Node]]] = []
    for node, found in below.items():
        if leads[node] and node is not source and found:
            same = [piece for piece in pieces if piece[1] & found]
            pieces = [piece for piece in pieces if piece not in same]
            nodes = [each for piece in same for each in piece[0]]
            pieces.append(([*nodes, node], found.union(*(piece[1] for piece in same))))
    return [Piece(nodes, {leaf: leaves[leaf] for leaf in leaves if leaf in found}) for nodes, found in pieces]


def _children(node: Node) -> Sequence[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(root: Node | None) -> list[Node]:
    """Every node under root after all that it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)] if root is not None else []
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in _children(node) if child not in seen]
    return order
