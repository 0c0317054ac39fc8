"""The shared table of cases of methods that choose chunks."""

from dataclasses import dataclass, field, replace

from cases import PAPER, ROPES, STORED, TOLERANCE, OpCase
from oracle import Segment
from oracle_chunks import LongHeads

HALF = 2.0**-10  # one step of a half
REPRESENTATIONS = ("attention", "minmax", "outlier", "keys1", "keys2")
POSITIONS = ("full", "string", "dca", "selfextend")  # of a base; and packed, with attention alone
N_TRAINED = 64  # of a layer whose window is not longer


@dataclass(frozen=True)
class ChunkCase(OpCase):
    """One call of ``lctx_layer_run``: every row comes with its query."""

    method: LongHeads = field(default_factory=lambda: LongHeads(16, 96))
    n_ubatch: int = 64

    @property
    def n_ctx_train(self) -> int:
        """Return the context of the model: as short as the base allows, so that its angles end early."""
        return max(N_TRAINED, self.method.window, self.n_rows if self.method.position == "string" else 0)

    @property
    def in_context(self) -> LongHeads:
        """Return the method with the contexts of the layer."""
        return replace(self.method, n_ctx_train=self.n_ctx_train, n_ctx=self.n_rows)

    def segments(self) -> list[list[Segment]]:
        """Return segments that are not read: the choice makes them."""
        return [[Segment(0, 0, 0)]] * self.n_rows


def chunk_case(name: str, n_rows: int = 257, sharpness: float = 2.0, **settings) -> ChunkCase:
    return ChunkCase(name, n_rows=n_rows, n_tokens=n_rows, sharpness=sharpness, **settings)


def with_method(case: ChunkCase, name: str = "", **settings) -> ChunkCase:
    """Change settings of the method, and append to the name."""
    return replace(case, name=f"{case.name}{name}", method=replace(case.method, **settings))


def _represented(cases: list[ChunkCase]) -> list[ChunkCase]:
    """Return every case with every representation; ``attention`` is packed, and its heads choose alone."""
    names = REPRESENTATIONS[1:]
    packed = [case for case in cases if case.method.select == "head"]
    return [
        *(with_method(case, "-attention", **PAPER) for case in packed),
        *(with_method(case, f"-{r}", representation=r) for case in cases for r in names),
    ]


def _placed(cases: list[ChunkCase]) -> list[ChunkCase]:
    """Return every case with every base, and side by side; the representations take turns."""
    turns = [
        (case, p, REPRESENTATIONS[1 + (i + j) % 4]) for i, case in enumerate(cases) for j, p in enumerate(POSITIONS)
    ]
    return [
        *(with_method(case, f"-{p}-{r}", position=p, representation=r) for case, p, r in turns),
        *(with_method(case, "-attention", **PAPER) for case in cases),
    ]


def _chunk_sizes() -> list[ChunkCase]:
    cases = []
    for size in (16, 32, 48, 80):
        window = 4 * size
        rows = {1, size - 1, size, size + 1, window - 1, window, window + 1, 2 * window + 5, 257, 321}
        method = LongHeads(size, window)
        cases += [chunk_case(f"chunk{size}-rows{n}", n_rows=n, method=method) for n in sorted(rows)]
    return cases


def _chunk_heads() -> list[ChunkCase]:
    heads = [(1, 1), (8, 8), (2, 1), (4, 1), (8, 2), (6, 2)]
    by_head = [chunk_case(f"heads{h}x{kv}", n_head=h, n_head_kv=kv, n_threads=2) for h, kv in heads]
    return by_head + [with_method(case, "-group", select="group") for case in by_head]


def _chunk_dims() -> list[ChunkCase]:
    """Return heads with and without a transform of the index, and of no whole words of codes."""
    return [chunk_case(f"dim{d}", head_dim_k=d, head_dim_v=d) for d in (8, 24, 32, 40, 80, 96, 128, 512)]


def _chunk_types() -> list[ChunkCase]:
    pairs = [(t, t) for t in TOLERANCE] + [("f16", "q8_0"), ("q8_0", "f32"), ("q4_0", "f16")]
    return [chunk_case(f"k-{k}-v-{v}", type_k=k, type_v=v) for k, v in pairs]


def _chunk_ropes() -> list[ChunkCase]:
    names = ("neox", "norm-partial", "neox-partial", "linear", "factors", "yarn", "yarn-neox", "yarn-partial-factors")
    return [chunk_case(f"rope-{name}", rope=ROPES[name]) for name in names]


def _chunk_options() -> list[ChunkCase]:
    base = chunk_case("options")
    return [
        with_method(replace(base, n_ubatch=7), "-ubatch7-group", select="group"),
        with_method(replace(base, n_ubatch=1, n_threads=3), "-ubatch1-threads3-group", select="group"),
        chunk_case(
            "few-tokens", n_rows=1100, n_head=2, n_head_kv=1, n_ubatch=11, n_threads=3, method=LongHeads(16, 160)
        ),
        with_method(chunk_case("short", n_rows=9), "-group", select="group"),
        chunk_case("softcap", softcap=3.0),
        chunk_case("long", n_rows=515, n_head=2, n_head_kv=1, n_ubatch=512, method=LongHeads(16, 160, n_recent=2)),
    ]


def _chunk_bases() -> list[ChunkCase]:
    """Return settings that move the runs."""
    base = chunk_case("base")
    cases = [
        *(with_method(base, f"-recent{n}", n_recent=n) for n in (0, 1, 2)),
        with_method(base, "-chunk48", chunk_size=48, window=192),
        with_method(base, "-all-chosen", window=272),
    ]
    return [
        with_method(case, f"-{p}-{r}", position=p, representation=r)
        for case in cases for p in POSITIONS for r in ("minmax", "keys2")
    ]  # fmt: skip


def _chunk_tiles() -> list[ChunkCase]:
    """Return prompts whose tiles share their chunks: ends of 63, 64 and 65 rows, odd ubatches, all angles."""
    shared = LongHeads(16, 64, tile=64, tile_window=96)
    rows = [
        chunk_case(f"tile-rows{n}", n_rows=n, n_ubatch=512, method=shared) for n in (63, 64, 65, 257, 319, 320, 321)
    ]
    ubatches = [chunk_case(f"tile-ubatch{n}", n_ubatch=n, method=shared) for n in (1, 63, 64, 65, 100, 128, 257)]
    heads = [
        chunk_case(f"tile-heads{h}x{kv}", n_head=h, n_head_kv=kv, n_threads=2, n_ubatch=257, method=shared)
        for h, kv in ((1, 1), (4, 4), (7, 1), (8, 2), (16, 1))
    ]
    base = chunk_case("tile", n_rows=400, n_ubatch=400, method=shared)
    bases = [
        with_method(base, f"-{p}-{r}-chunk{size}", position=p, representation=r, chunk_size=size, window=4 * size,
                    tile_window=5 * size)
        for p in POSITIONS for r, size in (("keys1", 16), ("keys2", 48))
    ]  # fmt: skip
    options = [
        with_method(base, "-group", select="group"),
        with_method(base, "-recent0", n_recent=0),
        with_method(base, "-all", tile_window=400),
        *(with_method(base, f"-cutoff{n}", tile_window=192, tile_cutoff=n) for n in (0, 2, 3)),
        with_method(base, "-cutoff3-dca", tile_window=128, tile_cutoff=3, position="dca"),
        replace(base, name="tile-softcap", softcap=3.0),
        *(replace(base, name=f"tile-dim{d}", head_dim_k=d, head_dim_v=d) for d in (24, 40, 128, 512)),
        *(
            replace(base, name=f"tile-{k}-{v}", type_k=k, type_v=v)
            for k, v in (("f16", "f16"), ("q8_0", "q4_0"), ("bf16", "bf16"))
        ),
    ]
    return [*rows, *ubatches, *heads, *bases, *options]


def _chunk_transformed() -> list[ChunkCase]:
    """Return cases with rows stored transformed: summaries are of rows as they were."""
    whole = [
        chunk_case(f"hadamard-k-{k}-v-{v}", type_k=k, type_v=v, hadamard_k=64, hadamard_v=64, rope=ROPES["neox"])
        for k, v in STORED
    ]
    yarn = chunk_case("hadamard-yarn", rope=ROPES["yarn-partial-factors"], hadamard_k=64, type_k="q8_0")
    return [*whole, yarn]


def _chunk_transformed_dims() -> list[ChunkCase]:
    dims = [(32, 32, 32), (96, 32, 32), (128, 128, 64), (256, 64, 32), (512, 512, 64)]
    return [
        chunk_case(f"hadamard-dim{n}", head_dim_k=n, head_dim_v=n, hadamard_k=k, hadamard_v=v, n_rows=131)
        for n, k, v in dims
    ]


CHUNK_CASES = [
    *_represented([*_chunk_sizes(), *_chunk_heads(), *_chunk_dims(), *_chunk_options(), *_chunk_transformed_dims()]),
    *_placed([*_chunk_types(), *_chunk_ropes(), *_chunk_transformed()]),
    *_chunk_bases(),
    *_chunk_tiles(),
]
