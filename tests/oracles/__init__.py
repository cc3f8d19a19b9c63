"""Slow, naive twins of the page allocator, the radix tree and the whole pool.

They know the contract and nothing of the code under test: sets, dicts and one trie node per page,
no runs, no lists in recency order, no ledger marks.
"""
