"""Compiled bookkeeping of kvpool: tokens and pages, nothing of devices, layers or requests."""
