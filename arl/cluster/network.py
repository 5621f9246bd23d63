"""Whether nodes reach each other: each tries listeners on the others, all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from arl.api.placed import Finding
from arl.cluster.cluster_node import Ask

Link = tuple[str, str]
"""The ids of two nodes: from, to."""
_TOLD = 16
"""How many pairs of nodes are named."""


def pairs(nodes: Sequence[str]) -> list[Link]:
    return list(permutations(nodes, 2))


def star(middle: str, others: Sequence[str]) -> list[Link]:
    return [link for node in others if node != middle for link in ((node, middle), (middle, node))]


def unreached(ask: Ask, links: Sequence[Link], addresses: Mapping[str, str]) -> dict[Link, str]:
    """The links that do not work, and why. addresses: at which each node is tried."""
    goals = {to for _, to in links}
    listening = {i: at for i, at in ask("listens", {to: (addresses[to],) for to in goals}).items() if _is_fine(at)}
    tries: dict[str, list[str]] = {}
    for one, other in dict.fromkeys(links):
        if other in listening:
            tries.setdefault(one, []).append(other)
    places = {one: ([(addresses[to], *listening[to]) for to in others],) for one, others in tries.items()}
    answers = {one: said for one, said in ask("reaches_all", places).items() if _is_fine(said)}
    return {
        (one, to): f"at {addresses[to]}: {reason}"
        for one, said in answers.items()
        for to, reason in zip(tries[one], said, strict=True)
        if reason
    }


def _is_fine(answer: object) -> bool:
    return not isinstance(answer, Exception)


def network_findings(faults: Mapping[Link, str], names: Mapping[str, str]) -> Iterator[Finding]:
    """A mistake for each pair of nodes. names: what a node is called, and what is on it."""
    texts, told = list[str](), set[Link]()
    for (one, other), reason in faults.items():
        back = faults.get((other, one))
        if back is None:
            texts.append(f"{names[one]} does not reach {names[other]} ({reason})")
        elif (other, one) not in told:
            texts.append(f"{names[one]} and {names[other]} do not reach each other ({reason}; {back})")
        told.add((one, other))
    way = "let connections through between these machines, in both directions and at all ports"
    own = ", or set weights.address to an address of rank 0's node that servers reach"
    for text in texts[:_TOLD]:
        yield Finding(text=f"{text}: {way}{own if '://' in text and 'rank 0' in text else ''}")
    if len(texts) > _TOLD:
        yield Finding(text=f"{len(texts) - _TOLD} more pairs of nodes do not reach each other")
