"""Tiny models that can retrieve, from a folder of text to a GGUF file; the command is ``training/train_tiny.py``."""
