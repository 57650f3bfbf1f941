"""The policy: which block is kept where, decided in constant time per block.

Pure Python over integers and key bytes: no torch, no clock, no I/O, no threads of its own.
"""
