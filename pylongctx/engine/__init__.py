"""From tokens to tokens: a model, its context, the sequences in it, and the engine that evaluates them.

``Model`` and ``Context`` own the native objects. A ``Session`` is one sequence: which tokens are evaluated, which
logits are known. The ``Engine`` runs jobs on sessions; ``Solo`` drives it for one reader, ``EngineThread`` for many.
"""
