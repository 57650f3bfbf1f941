"""Shared, GPU-first snapshot cache of KV blocks for vLLM replicas served by Xinference."""

__version__ = "0.1.0"
