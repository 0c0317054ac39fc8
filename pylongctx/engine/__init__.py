"""Models, contexts and sequences, and the engine that evaluates them.

``Model`` and ``Context`` own the native objects. A ``Session`` is one sequence: its evaluated tokens
and known logits. The ``Engine`` runs jobs on sessions; ``Solo`` drives it for one caller, ``EngineThread`` for many.
"""
