"""Evaluation tasks: pure functions and dataclasses, without printing."""
