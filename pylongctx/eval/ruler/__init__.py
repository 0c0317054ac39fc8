"""RULER's 13 tasks (arXiv 2404.06654), made here from a seed.

Random numbers are drawn in RULER's own order, so where a task's data are free the prompts are RULER's to the byte, for
a tokenizer that adds no BOS token. Else they are labelled "RULER-compatible": the haystack of essays is another text,
sentences are split by punctuation and not by nltk, and common words come from a generated list beyond wonderwords'.
"""

from pylongctx.eval.ruler.task import NAMES, Ruler

__all__ = ["NAMES", "Ruler"]
