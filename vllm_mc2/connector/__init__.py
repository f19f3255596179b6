"""The vLLM connector; the only package that imports vllm."""

from vllm_mc2.connector.connector import MC2Connector

__all__ = ["MC2Connector"]
