"""Counters and profiles of one GPU."""
