"""Analysis of heads: the chunks that they read, the keys that they keep, memory, and attention sparsity.

LongHeads, arXiv 2402.10685, section 4.1 (table 3, figure 5) and CORM, arXiv 2404.15949 (figures 1 and 4).
``Llama.trace`` creates records of chunks; nothing here needs the native library until a ``Llama`` is passed.
"""

from pylongctx.attention.kept import Compression, column_shares, compression, held_map, observer, sparsity
from pylongctx.attention.stats import chunks_of, cover_rate, findings, hit_rate, numbers, uniformity
from pylongctx.attention.trace import Trace

__all__ = [
    "Compression",
    "Trace",
    "chunks_of",
    "column_shares",
    "compression",
    "cover_rate",
    "findings",
    "held_map",
    "hit_rate",
    "numbers",
    "observer",
    "sparsity",
    "uniformity",
]
