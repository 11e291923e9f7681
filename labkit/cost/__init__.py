"""cost: pure arithmetic. What hardware can do, what a collective costs on it, and where each figure comes from.

The lowest room: it imports nothing but the standard library. Left out: measuring, which needs ranks.
"""
