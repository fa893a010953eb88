"""Benchmarks: cupyflash and every importable peer, timed in turn on the same inputs."""
