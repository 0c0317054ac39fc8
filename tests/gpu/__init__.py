"""The acceptance of a GPU: the command is ``python tests/gpu/acceptance.py``."""
