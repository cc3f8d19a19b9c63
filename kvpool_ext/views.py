"""What the tree tells people and callers: plain read-only tuples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class MatchResult(NamedTuple):
    """Answer of `RadixCache.match_prefix`.

    Attributes
    ----------
    length : int
        Matched tokens, a multiple of the page size.
    pages : ndarray
        int32 ``[length / page_size]``, the page ids of the match.
    node : int
        Handle of the deepest node of the match (the root where nothing matched); valid until that
        node is evicted, so lock it to keep it.
    """

    length: int
    pages: NDArray[np.int32]
    node: int


class InsertResult(NamedTuple):
    """Answer of `RadixCache.insert`: tokens cached before, and the deepest node's handle."""

    prefix_len: int
    node: int


class NodeView(NamedTuple):
    """One node of the tree, copied out.

    Attributes
    ----------
    node, parent : int
        Handles; the parent of a top-level node is its namespace's root.
    extra_key : str, bytes, int or None
        The namespace.
    start : int
        Tokens before this node on its path.
    tokens : ndarray
        int32 ``[num_pages * page_size]``.
    pages : ndarray
        int32 ``[num_pages]``.
    lock_ref : int
        Holders whose path passes through here.
    priority : int
        Class of the node; lower goes first.
    num_children : int
        Children in the index.
    detached : bool
        Left the index by a reset and lives until its last unlock.
    """

    node: int
    parent: int
    extra_key: str | bytes | int | None
    start: int
    tokens: NDArray[np.int32]
    pages: NDArray[np.int32]
    lock_ref: int
    priority: int
    num_children: int
    detached: bool


class Namespace(NamedTuple):
    """A root of the tree.

    Attributes
    ----------
    root : int
        Its handle.
    extra_key : str, bytes, int or None
        The namespace.
    dropped : bool
        Left the index by a reset, with its key; what hangs under it lives until its last unlock.
    """

    root: int
    extra_key: str | bytes | int | None
    dropped: bool


class TreeSurvey(NamedTuple):
    """The whole tree at one moment, one entry a node, copied out.

    The nodes stand in pre-order, namespace by namespace: a parent comes before its children, and
    the nodes below node ``i`` are ``i + 1 .. subtree_ends[i] - 1``. All arrays but `pages` are
    ``[num_nodes]``.

    Attributes
    ----------
    page_size : int
        Tokens per page.
    namespaces : list of Namespace
        Those without nodes too.
    handles : ndarray
        int64, node handles.
    parents : ndarray
        int32, where in these arrays the parent stands; -1 for a top-level node.
    namespace_ids : ndarray
        int32, index into `namespaces`.
    depths : ndarray
        int32, nodes above this one, 0 for a top-level node.
    subtree_ends : ndarray
        int32, the first index behind the node's subtree.
    starts : ndarray
        int64, tokens before the node on its path.
    num_pages : ndarray
        int32, pages of the node.
    lock_refs : ndarray
        int32, holders whose path passes through the node.
    priorities : ndarray
        int64, lower goes first.
    detached : ndarray
        bool, left the index by a reset.
    turns : ndarray
        int32, place in the order in which nodes would be evicted now, from 0 on; -1 while locked.
    pages : ndarray
        int32 ``[sum of num_pages]``, page ids of the first node, of the second, and so on.
    """

    page_size: int
    namespaces: list[Namespace]
    handles: NDArray[np.int64]
    parents: NDArray[np.int32]
    namespace_ids: NDArray[np.int32]
    depths: NDArray[np.int32]
    subtree_ends: NDArray[np.int32]
    starts: NDArray[np.int64]
    num_pages: NDArray[np.int32]
    lock_refs: NDArray[np.int32]
    priorities: NDArray[np.int64]
    detached: NDArray[np.bool_]
    turns: NDArray[np.int32]
    pages: NDArray[np.int32]

    @property
    def num_nodes(self) -> int:
        """Nodes that hold pages."""
        return self.handles.size

    def subtree_sums(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Sums of `values` ``[num_nodes]`` over each node and all below it, int64."""
        running = np.zeros(self.num_nodes + 1, np.int64)
        np.cumsum(values, out=running[1:])
        sums: NDArray[np.int64] = running[self.subtree_ends] - running[:-1]
        return sums


class Nearest(NamedTuple):
    """The cached sequence that has most leading tokens in common with a prompt.

    Attributes
    ----------
    common_len : int
        Leading tokens in common, not cut at pages.
    tokens : tuple of int
        Some of its tokens from there on.
    sequence_len : int
        Tokens of the longest cached sequence that goes on so.
    num_branches : int
        Cached continuations where the prompt leaves the tree.
    lock_ref : int
        Holders of the page in which they part.
    """

    common_len: int
    tokens: tuple[int, ...]
    sequence_len: int
    num_branches: int
    lock_ref: int


class Inquiry(NamedTuple):
    """What a ledger knows of one prompt, as `kvpool_ext.inquiry.inquire` found it.

    Attributes
    ----------
    extra_key : str, bytes, int or None
        The namespace, as the tree knows it.
    limit_len, cached_len : int
        Tokens that may match at all, and that are cached, whole pages.
    nearest : Nearest or None
        None where the tree has nothing else either, or all that may match is cached.
    evicted : list of tuple
        As `EvictionHistory.trace` answers, in pages.
    other : tuple or None
        ``(extra_key, tokens)`` of the namespace that holds most, if that is more.
    bound : tuple or None
        ``(tag, tokens)`` of the lease that would match most if it were cached, if that is more.
    """

    extra_key: str | bytes | int | None
    limit_len: int
    cached_len: int
    nearest: Nearest | None
    evicted: list[tuple[int, int, int, int, int, int]]
    other: tuple[str | bytes | int | None, int] | None
    bound: tuple[int, int] | None
