"""Opening a model: its context, adapters and store, from the arguments of ``Llama``."""
