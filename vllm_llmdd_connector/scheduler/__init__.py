"""Scheduler side: requests to leases, claims, keys and block indices. No I/O, no clock of its
own."""
