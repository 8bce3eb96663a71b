"""Benchmarks: what a filtered step costs on this machine, against what it must."""
