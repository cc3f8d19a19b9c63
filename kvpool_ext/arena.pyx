"""Memory of the radix tree: nodes in one array, and their hash index.

A node is an index into the arena, so that the array may grow and a handle can carry a generation. Children are found
through one hash table over (parent, first page); a hit is always confirmed by comparing the tokens, so a collision
costs time and never a wrong page. Each arena draws keys of its own for the hash, so that nobody can write prompts that
collide; nothing but time follows from a hash, so that every process hands out the same pages all the same.
"""
import os

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport INT32_MAX, int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from kvpool_ext.memory cimport free, malloc, realloc
from kvpool_ext.runs cimport UNIT, TokenRuns
from kvpool_ext.types cimport NO_NODE, node_t, page_t, prefetch, token_t


@cython.no_gc
cdef class NodeArena:
    """Nodes and hash index of one tree; `EvictionOrder` adds in which order they go."""

    # A subclass takes more than this.
    def __cinit__(self, Py_ssize_t page_size, Py_ssize_t num_tokens=0, Py_ssize_t num_remembered=0, *_):
        self.page_size = page_size
        # 64-bit keys first, then one of 32 bits for each token, the parent and, of pairs, what fills the last.
        self.hash_key = os.urandom(3 * sizeof(uint64_t) + (page_size + 2) * sizeof(uint32_t))
        self.fold_keys = <const uint64_t *>PyBytes_AS_STRING(self.hash_key)
        self.word_keys = <const uint32_t *>(self.fold_keys + 3)
        # Tokens of evicted pages that a history remembers lie where those of the tree do.
        self.runs = TokenRuns(num_tokens + num_remembered if num_tokens > 0 else 0)
        # A page stands once in the tree or with its holder; a matched one with both.
        self.id_runs = TokenRuns(num_tokens // page_size + num_tokens // page_size // 8)
        self.first_free = NO_NODE
        self.reserve(64)

    def __dealloc__(self):
        cdef node_t n
        for n in range(self.num_used):
            self.runs.give(self.nodes[n].tokens)
            self.id_runs.give(self.nodes[n].pages)
        free(self.nodes)
        free(self.buckets)

    # ---- nodes

    cdef int reserve(self, Py_ssize_t extra) except -1:
        """Make sure that `extra` calls of `new_node` succeed; MemoryError changes nothing."""
        cdef Py_ssize_t wanted = self.num_live + extra
        cdef Py_ssize_t grown = max(64, self.capacity)
        cdef Node *nodes
        cdef node_t *buckets
        cdef node_t n
        if wanted <= self.capacity:
            return 0
        while grown < wanted:
            grown *= 2
        if grown > INT32_MAX // 2:
            raise MemoryError(f"a tree of {wanted} nodes is beyond the arena's limit")
        nodes = <Node *>realloc(self.nodes, grown * sizeof(Node))
        if nodes == NULL:
            raise MemoryError(f"no memory for {grown} tree nodes")
        self.nodes = nodes
        buckets = <node_t *>malloc(grown * sizeof(node_t))
        if buckets == NULL:
            raise MemoryError(f"no memory for an index of {grown} buckets")
        # A generation outlives its node, so fresh entries start from a known one.
        memset(&self.nodes[self.capacity], 0, (grown - self.capacity) * sizeof(Node))
        self.capacity = <node_t>grown
        free(self.buckets)
        self.buckets = buckets
        self.bucket_mask = <uint32_t>(grown - 1)
        memset(buckets, 0xFF, grown * sizeof(node_t))
        for n in range(self.num_used):
            if self.nodes[n].generation & 1 and not self.nodes[n].flags & (IS_ROOT | IS_DETACHED):
                self.index_node(n)
        return 0

    cdef node_t new_node(self) noexcept nogil:
        """A zeroed node of no parent; `reserve` came before."""
        cdef node_t n = self.first_free
        cdef uint32_t generation
        if n != NO_NODE:
            self.first_free = self.nodes[n].next_in_bucket
        else:
            n = self.num_used
            self.num_used += 1
        generation = self.nodes[n].generation
        memset(&self.nodes[n], 0, sizeof(Node))
        self.nodes[n].generation = generation + 1
        self.nodes[n].parent = NO_NODE
        self.nodes[n].older = NO_NODE
        self.nodes[n].newer = NO_NODE
        self.num_live += 1
        return n

    cdef void drop_node(self, node_t n) noexcept nogil:
        """Free an unlinked, unindexed node; its handles go stale."""
        cdef Node *node = &self.nodes[n]
        self.runs.give(node.tokens)
        self.id_runs.give(node.pages)
        node.tokens = NULL
        node.pages = NULL
        node.generation += 1
        node.flags = 0
        node.next_in_bucket = self.first_free
        self.first_free = n
        self.num_live -= 1

    cdef int64_t handle_of(self, node_t n) noexcept nogil:
        return (<int64_t>(self.nodes[n].generation & 0x7FFFFFFF) << 32) | <int64_t>n

    cdef int64_t next_handle(self, Py_ssize_t k) noexcept nogil:
        """The handle of the node that `new_node` makes after `k` others; `reserve` came before."""
        cdef node_t n = self.first_free
        while n != NO_NODE and k > 0:
            n = self.nodes[n].next_in_bucket
            k -= 1
        if n == NO_NODE:
            n = self.num_used + <node_t>k
        return (<int64_t>((self.nodes[n].generation + 1) & 0x7FFFFFFF) << 32) | <int64_t>n

    cdef node_t resolve(self, object handle) except? -2:
        """The node behind a Python handle; ValueError when it died since."""
        cdef int64_t value
        cdef node_t n
        if isinstance(handle, bool) or not isinstance(handle, int):
            raise TypeError(f"a node handle is an int, got {type(handle).__name__}")
        if not 0 <= handle < (1 << 63):
            raise ValueError(f"{handle} is not a node handle")
        value = handle
        n = <node_t><uint32_t>value
        if (
            n < 0
            or n >= self.num_used
            or not self.nodes[n].generation & 1
            or self.handle_of(n) != value
        ):
            raise ValueError(f"node handle {handle} is stale: its node was evicted or dropped")
        return n

    # ---- hash index

    cdef uint32_t hash_page(self, node_t parent, const token_t *tokens) noexcept nogil:
        """Hash of a child key: NH over its tokens and `parent`, folded to 32 bits.

        NH is of UMAC (Fast and Secure Message Authentication, CRYPTO 1999): words and keys add modulo 2^32, pairs of
        sums multiply to 64 bits. Two different inputs agree in it for 2^-32 of all keys, whoever chose them. The fold
        is pair-multiply-shift (High Speed Hashing for Integers and Strings, 2015), so that any bits of the result make
        a bucket. A seed for a multiply-xor hash would not do: some differences cancel in it under every seed.
        """
        cdef const uint32_t *words = <const uint32_t *>tokens
        cdef const uint32_t *keys = self.word_keys
        cdef Py_ssize_t num_pairs = self.page_size >> 1, i
        cdef uint32_t last = 0
        cdef uint64_t total = 0
        for i in range(num_pairs):
            total += <uint64_t><uint32_t>(words[2 * i] + keys[2 * i]) * <uint32_t>(words[2 * i + 1] + keys[2 * i + 1])
        if self.page_size & 1:
            last = words[2 * num_pairs]
        total += <uint64_t><uint32_t>(last + keys[2 * num_pairs]) * <uint32_t>(
            <uint32_t>parent + keys[2 * num_pairs + 1]
        )
        total = ((total >> 32) + self.fold_keys[0]) * ((total & 0xFFFFFFFFu) + self.fold_keys[1])
        return <uint32_t>((total + self.fold_keys[2]) >> 32)

    def hash_of(self, parent, const token_t[::1] tokens):
        """`hash_page` of a page ``[page_size]``, for tests and benchmarks."""
        if tokens.shape[0] != self.page_size:
            raise ValueError(f"expected {self.page_size} tokens, got {tokens.shape[0]}")
        return self.hash_page(parent, &tokens[0])

    cdef node_t find_child(self, node_t parent, const token_t *tokens) noexcept nogil:
        """The child of `parent` whose first page equals `tokens`, or NO_NODE."""
        cdef uint32_t key_hash = self.hash_page(parent, tokens)
        cdef node_t n = self.buckets[key_hash & self.bucket_mask]
        cdef Node *node
        while n != NO_NODE:
            node = &self.nodes[n]
            if (
                node.key_hash == key_hash
                and node.parent == parent
                and memcmp(node.tokens, tokens, self.page_size * sizeof(token_t)) == 0
            ):
                return n
            n = node.next_in_bucket
        return NO_NODE

    cdef void index_node(self, node_t n) noexcept nogil:
        cdef Node *node = &self.nodes[n]
        cdef node_t *bucket = &self.buckets[node.key_hash & self.bucket_mask]
        node.next_in_bucket = bucket[0]
        bucket[0] = n

    cdef void unindex_node(self, node_t n) noexcept nogil:
        cdef node_t *link = &self.buckets[self.nodes[n].key_hash & self.bucket_mask]
        while link[0] != n:
            link = &self.nodes[link[0]].next_in_bucket
        link[0] = self.nodes[n].next_in_bucket

    cdef void clear_index(self) noexcept nogil:
        memset(self.buckets, 0xFF, <size_t>self.capacity * sizeof(node_t))

    # ---- ahead of an eviction

    cdef void expect(self, node_t n) noexcept nogil:
        """Ask for what removing `n` will touch, and for the header of the node that is newer than it.

        In a large tree each of these is a cache miss, and the misses of one victim follow from its header.
        """
        cdef Node *node
        if n == NO_NODE:
            return
        node = &self.nodes[n]
        prefetch(node.pages, -UNIT)
        prefetch(node.pages, (<Py_ssize_t>node.num_pages - 1) * <Py_ssize_t>sizeof(page_t))
        prefetch(node.tokens, -UNIT)
        prefetch(&self.buckets[node.key_hash & self.bucket_mask], 0)
        prefetch(&self.nodes[max(node.parent, 0)], 0)
        prefetch(&self.nodes[max(node.newer, 0)], 0)
