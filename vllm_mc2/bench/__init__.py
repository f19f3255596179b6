"""Benchmarks: ``handoff`` (two processes, tensors, no vLLM) and ``serve`` (real servers).

``stats`` and ``machine`` are shared by both; importing this package imports nothing heavy.
"""
