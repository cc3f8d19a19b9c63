"""The slow look at the whole structure: what the `check` methods verify, and who owns a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool_ext.audit_order import check_order

if TYPE_CHECKING:
    from kvpool_ext.lease import PageLease
    from kvpool_ext.ledger import PageLedger
    from kvpool_ext.views import NodeView


def _fail(text: str) -> None:
    raise RuntimeError(f"the radix tree is out of sync: {text}")


def check_tree(snapshot: dict[str, Any]) -> None:
    """Verify the invariants (I1) to (I6) of `kvpool_ext.tree` on a snapshot of the tree.

    Raises
    ------
    RuntimeError
        Naming the node or page that breaks an invariant.
    """
    nodes: dict[int, dict[str, Any]] = snapshot["nodes"]
    _check_links(nodes, snapshot["roots"], snapshot["num_live"])
    _check_pages(nodes, snapshot)
    check_order(snapshot)
    for node, count in snapshot["user_locks"].items():
        if node not in nodes or nodes[node]["lock_ref"] < count:
            _fail(f"node {node} has {count} locks of its caller but fewer in the tree")


def _check_links(nodes: dict[int, dict[str, Any]], roots: dict[Any, int], num_live: int) -> None:
    if len(nodes) != num_live:
        _fail(f"{len(nodes)} nodes live, {num_live} counted")
    for key, root in roots.items():
        if root not in nodes or not nodes[root]["is_root"]:
            _fail(f"namespace {key!r} has no root")
    children: dict[int, list[int]] = {}
    for n, node in nodes.items():
        if node["is_root"]:
            continue
        if node["parent"] not in nodes:
            _fail(f"node {n} hangs under node {node['parent']}, which is gone")
        if not node["pages"]:
            _fail(f"node {n} holds no page")
        if not node["detached"] and node["found"] != n:
            _fail(f"node {n} is not found under its key (found {node['found']})")
        children.setdefault(node["parent"], []).append(n)
    for n, node in nodes.items():
        below = children.get(n, [])
        if node["num_children"] != len(below):
            _fail(f"node {n} counts {node['num_children']} children, has {len(below)}")
        held = sum(nodes[child]["lock_ref"] for child in below)
        if not node["is_root"] and node["lock_ref"] < held:
            _fail(f"node {n} has lock_ref {node['lock_ref']}, its children {held}")


def _check_pages(nodes: dict[int, dict[str, Any]], snapshot: dict[str, Any]) -> None:
    owner: dict[int, int] = {}
    evictable = protected = orphans = 0
    for n, node in nodes.items():
        for page in node["pages"]:
            if page in owner:
                _fail(f"page {page} is in node {owner[page]} and in node {n}")
            owner[page] = n
        if node["lock_ref"] > 0:
            protected += len(node["pages"])
        elif not node["is_root"]:
            evictable += len(node["pages"])
            orphans += len(node["pages"]) if node["detached"] else 0
    found = (evictable, protected, orphans)
    counted = (snapshot["evictable"], snapshot["protected"], snapshot["orphans"])
    if found != counted:
        _fail(f"evictable, protected, orphan pages are {found}, counted {counted}")


def check_ledger(ledger: PageLedger) -> None:
    """Verify that every page has one owner, and every lock a holder.

    Raises
    ------
    RuntimeError
        Naming the page and its claimants, or the node whose locks do not add up.
    """
    num_pages = ledger.allocator.num_pages
    claims = np.zeros(num_pages, np.int64)
    held = np.zeros(num_pages, np.int64)
    tree_pages = [view.pages for view in ledger.tree.nodes()]
    for group in (ledger.allocator.free_pages(), ledger.allocator.taken_pages(), *tree_pages):
        np.add.at(claims, group, 1)
    for lease in ledger.leases.values():
        np.add.at(held, lease.private_pages(), 1)
    claims += held > 0
    strays = set(ledger.fetching) - set(ledger.allocator.taken_pages().tolist())
    if strays:
        raise RuntimeError(
            f"the ledger is out of sync: page {min(strays)} waits for a prefetch and is not taken"
        )
    if (claims != 1).any():
        page = int(np.argmax(claims != 1))
        raise RuntimeError(
            f"the ledger is out of sync: page {page} has {claims[page]} owners: "
            f"{_claimants(ledger, page)}"
        )
    for page in np.flatnonzero(held).tolist():
        if ledger.holders_of(page) != held[page]:
            raise RuntimeError(
                f"the ledger is out of sync: page {page} counts {ledger.holders_of(page)} "
                f"holders, has {held[page]}"
            )
    for handle, lock_ref, holders in ledger.lock_counts():
        if lock_ref != holders:
            raise RuntimeError(
                f"the ledger is out of sync: node {handle} has lock_ref {lock_ref}, "
                f"{holders} hold it"
            )


def locate(ledger: PageLedger, page: int) -> tuple[str, PageLease | NodeView | None, int]:
    """Who has `page`, as `PageLedger.locate` says it."""
    num_pages = ledger.allocator.num_pages
    if not 0 <= page < num_pages:
        raise ValueError(f"page {page} is not one of the {num_pages} pages of this pool")
    if ledger.allocator.is_free(page):
        return "free", None, 0
    if page in ledger.allocator.taken_pages():
        return "taken", None, 0
    for view in ledger.tree.nodes():
        found = np.flatnonzero(view.pages == page)
        if found.size:
            return "tree", view, int(found[0])
    for lease in ledger.leases.values():
        found = np.flatnonzero(lease.pages() == page)
        if found.size:
            return "private", lease, int(found[0])
    raise RuntimeError(f"the ledger is out of sync: page {page} has no owner")


def _claimants(ledger: PageLedger, page: int) -> str:
    found = ["the free list"] if page in ledger.allocator.free_pages() else []
    found += ["taken"] if page in ledger.allocator.taken_pages() else []
    found += [f"tree node {view.node}" for view in ledger.tree.nodes() if page in view.pages]
    found += [
        f"lease {lease.tag}" for lease in ledger.leases.values() if page in lease.private_pages()
    ]
    return ", ".join(found) or "nobody"
