"""The slow look at the order of eviction: classes, lists, and who waits, in a tree's snapshot."""

from __future__ import annotations

from typing import Any

Snapshot = dict[str, Any]


def check_order(snapshot: Snapshot) -> None:
    """Verify (I6) of `kvpool_ext.tree` for the policy of the tree.

    Raises
    ------
    RuntimeError
        Naming the node or class that stands where it should not.
    """
    nodes = {n: node for n, node in snapshot["nodes"].items() if not node["is_root"]}
    classes = snapshot["classes"]
    members: dict[int, list[int]] = {}
    for n, node in nodes.items():
        members.setdefault(node["rank"], []).append(n)
    ranks = {cls["rank"]: (cls["priority"], cls["uses"]) for cls in classes}
    ranks[classes[0]["rank"]] = (-(1 << 40), 0)  # the detached, below all others
    _check_classes(classes, members, list(ranks.values()))
    place = _check_lists(nodes, classes)
    fifo = snapshot["policy"] == "fifo"
    for n, node in nodes.items():
        parent = nodes.get(node["parent"])
        if parent is not None and ranks[parent["rank"]] < ranks[node["rank"]]:
            _fail(
                f"node {n} has (priority, uses) {ranks[node['rank']]}, its parent "
                f"{node['parent']} only {ranks[parent['rank']]}"
            )
        if fifo and not node["detached"]:
            _check_entered(n, node)
        else:
            _check_recent(n, node, parent, place)
    _check_waiting(nodes, snapshot["waiting"], ranks)
    if fifo:
        for cls in classes[1:]:
            _check_entries(nodes, cls, members.get(cls["rank"], []))


def _fail(text: str) -> None:
    raise RuntimeError(f"the radix tree is out of sync: {text}")


def _check_classes(
    classes: list[Snapshot], members: dict[int, list[int]], order: list[tuple[int, int]]
) -> None:
    if order != sorted(set(order)):
        _fail(f"the classes stand as (priority, uses) {order}")
    heads = [cls["rank"] for cls in classes if cls["head"] == cls["rank"]]
    for i, cls in enumerate(classes):
        rank, num_nodes = cls["rank"], len(members.get(cls["rank"], []))
        if not cls["linked_back"]:
            _fail(f"the ring of classes breaks behind class {rank}")
        if num_nodes != cls["num_nodes"]:
            _fail(f"class {rank} counts {cls['num_nodes']} nodes, has {num_nodes}")
        last = i + 1 == len(classes) or classes[i + 1]["head"] != rank
        if i and num_nodes == 0 and last:
            _fail(f"class {rank} has no node, and is no head of others")
        if cls["head"] != rank:
            before = classes[i - 1]
            if (cls["head"], cls["priority"]) != (before["head"], before["priority"]):
                _fail(f"class {rank} stands behind a class of another head")
            continue
        here = heads.index(rank)
        around = heads[here - 1], heads[(here + 1) % len(heads)]
        if (cls["prev_head"], cls["next_head"]) != around:
            _fail(f"the ring of heads breaks at class {rank}")
        if i and cls["uses"] != 1:
            _fail(f"class {rank} is a head of {cls['uses']} uses")
    if members.keys() - {cls["rank"] for cls in classes}:
        _fail("a node is in a class that is not in use")


def _check_lists(
    nodes: dict[int, Snapshot], classes: list[Snapshot]
) -> dict[int, tuple[int, int]]:
    """Where each listed node stands: its class in order, and its position from the old end."""
    place: dict[int, tuple[int, int]] = {}
    for order, cls in enumerate(classes):
        for position, (n, linked_back) in enumerate(cls["members"]):
            if not linked_back:
                _fail(f"the list of class {cls['rank']} breaks before node {n}")
            if n in place or n not in nodes or nodes[n]["rank"] != cls["rank"]:
                _fail(f"node {n} should not be on the list of class {cls['rank']}")
            place[n] = (order, position)
    for n, node in nodes.items():
        if node["linked"] != (n in place):
            _fail(f"node {n} says linked={node['linked']}, and is found otherwise")
    return place


def _check_recent(
    n: int, node: Snapshot, parent: Snapshot | None, place: dict[int, tuple[int, int]]
) -> None:
    """Unlocked nodes are listed, locked ones are not, and children stand before their parents."""
    if node["waiting"] or (node["lock_ref"] == 0) != node["linked"]:
        _fail(
            f"node {n} with lock_ref {node['lock_ref']} says linked={node['linked']}, "
            f"waiting={node['waiting']}"
        )
    if parent is None or parent["lock_ref"] > 0 or node["lock_ref"] > 0:
        return
    if place[node["parent"]] < place[n]:
        _fail(f"node {n} stands behind its parent {node['parent']}")


def _check_entered(n: int, node: Snapshot) -> None:
    """A node is listed, or waits, or cannot go."""
    if node["linked"] and node["waiting"]:
        _fail(f"node {n} is on a list and waits")
    if not (node["linked"] or node["waiting"] or node["lock_ref"] or node["num_children"]):
        _fail(f"node {n} can go, and eviction would not find it")


def _check_waiting(
    nodes: dict[int, Snapshot],
    waiting: list[tuple[int, int]],
    ranks: dict[int, tuple[int, int]],
) -> None:
    keys = []
    for i, (n, index) in enumerate(waiting):
        if index != i or n not in nodes or not nodes[n]["waiting"]:
            _fail(f"node {n} is at {i} of those that wait, and says {index}")
        keys.append((ranks[nodes[n]["rank"]], nodes[n]["entry"]))
        if keys[i] < keys[max(0, i - 1) // 2]:
            _fail(f"node {n} waits behind node {waiting[(i - 1) // 2][0]}, which came later")
    if sum(node["waiting"] for node in nodes.values()) != len(waiting):
        _fail("a node says that it waits, and does not")


def _check_entries(nodes: dict[int, Snapshot], cls: Snapshot, members: list[int]) -> None:
    """A list is in order of entry, and what it has passed came earlier than all on it."""
    entries = [nodes[n]["entry"] for n, _ in cls["members"]]
    passed = [nodes[n]["entry"] for n in members if not nodes[n]["linked"]]
    if entries != sorted(entries):
        _fail(f"the list of class {cls['rank']} is not in order of entry: {entries}")
    if entries and passed and max(passed) > entries[0]:
        _fail(f"class {cls['rank']} has passed entry {max(passed)}, but lists {entries[0]}")
