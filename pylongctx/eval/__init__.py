"""Evaluation tasks: pure functions and dataclasses, without printing.

A ``task.Task`` makes samples from a length and a seed; it says what a Llama does with one, and what numbers follow from
the records. A ``Question`` is answered greedily and scored by functions of ``scorers``. A ``runner.Cell`` is one method
on the samples of one task and length: ``runner.run`` yields its records, ``runner.Results`` keeps them in a file.
"""
