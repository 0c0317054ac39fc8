"""Several answers at once on one model: for asyncio, and for the server.

A ``Host`` is a model whose context has several sequences, and a ``Ticket`` is one answer of its engine.
"""
