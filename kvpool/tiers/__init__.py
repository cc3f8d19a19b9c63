"""Tiers: places for pages outside of the pool."""
