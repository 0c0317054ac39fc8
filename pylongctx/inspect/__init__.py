"""Which chunks of the text the heads read: records of it, the numbers of table 3 and the map of figure 5.

LongHeads, arXiv 2402.10685, section 4.1. ``Llama.trace`` makes the records; nothing here needs the native library.
"""

from pylongctx.inspect.stats import chunks_of, cover_rate, hit_rate, uniformity
from pylongctx.inspect.trace import Trace

__all__ = ["Trace", "chunks_of", "cover_rate", "hit_rate", "uniformity"]
