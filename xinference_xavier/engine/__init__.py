"""The cache inside vLLM: a connector, a manager in the scheduler process and a worker per rank.

Never imports xinference: an engine runs without it.
"""
