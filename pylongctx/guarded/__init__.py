"""Untrusted input in worker processes, which may crash."""
