"""The shared tables of cases: what the op tests and the method tests run over.

Sizes are odd on purpose: one row, one page of 64 rows and its neighbours, a head that no vector width divides.

Tolerances are fractions of the largest absolute value of the reference. f32 rows leave float rounding only. The oracle
rounds the rotated keys and the values to the storage type too, so for f16 and q8_0 what remains is a rounding that
falls the other way when float32 and float64 disagree in the last bit: one step of one element here and there. A step of
q4_0 is an eighth of the largest value of its block.
"""

import platform
from dataclasses import dataclass, field, replace

import numpy as np
from oracle import NEOX, NORM, DualChunk, Full, Method, Rope, Segment, SelfExtend, ShiftedRotary, Window
from oracle_chunks import LongHeads

TOLERANCE = {
    "f32": 1e-4,
    "f16": 1e-3,
    "bf16": 8e-3,
    "q8_0": 2e-3,
    "q5_0": 1e-2,
    "q5_1": 1e-2,
    "q4_0": 2e-2,
    "q4_1": 2e-2,
    "iq4_nl": 2e-2,
}
EIGHT_BITS = 1.5e-2  # of an output, when factors are rounded to 8 bits
# tokens of a graph whose factors are rounded on no x86-64 CPU, with 2 query heads per KV head: 4 columns
# (native/cpu/block.h)
FEW_TOKENS = 2
# columns up to which K is not multiplied as integers: ARM does so for few columns too (native/cpu/few-integers.h)
FLOAT_COLUMNS = 0 if platform.machine() in ("aarch64", "arm64") else 8
LOGIT_TOLERANCE = 1e-4  # of the largest logit, f32 KV

PAPER = {"representation": "attention", "position": "packed"}
LONGHEADS = {  # for models trained on 64 positions, read in a context of N_LONG
    "longheads-keys": LongHeads(16, 64, position="dca", n_ctx_train=64),
    "longheads-attention": LongHeads(16, 64, **PAPER),
    "longheads-minmax": LongHeads(16, 64, select="group", representation="minmax"),
    "longheads-selfextend": LongHeads(
        16, 64, n_recent=0, representation="outlier", position="selfextend", n_ctx_train=64, n_ctx=256
    ),
}

# settings that do something on 60 (LongHeads: 200) tokens of a model trained on 64
SPECS = {
    "full": "full",
    "window": "window,n_sink=3,window=40",
    "selfextend": "selfextend,group_size=7,neighbor_window=21",
    **{name: method.text() for name, method in LONGHEADS.items()},
    "dca": "dca,chunk_size=23,local_window=9",
    "string": "string,shift_offset=37,local_window=9",
}
# No settings of STRING reach twice the trained context: linear scaling stretches it, in tests of longer texts.
STRETCHED = {SPECS["string"]: {"rope_scaling_type": 1, "rope_freq_scale": 1 / 16}}
PAGE_ROWS = 64


@dataclass(frozen=True)
class OpCase:
    """One call of ``lctx_op_run``. ``method`` gives the segments of causal queries at the end of the rows."""

    name: str
    n_rows: int = 65
    n_tokens: int = 7
    head_dim_k: int = 64
    head_dim_v: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    type_k: str = "f32"
    type_v: str = "f32"
    hadamard_k: int = 0
    hadamard_v: int = 0
    n_threads: int = 1
    softcap: float = 0.0
    sharpness: float = 1.0
    lse: bool = True
    near_rows: int = 0
    method: Method = field(default_factory=Full)
    random_segments: int = 0
    seed: int = 0
    rope: dict = field(default_factory=dict, hash=False)

    @property
    def rounding(self) -> float:
        """How far stored rows may be from the oracle's."""
        return max(TOLERANCE[self.type_k], TOLERANCE[self.type_v])

    @property
    def tolerance(self) -> float:
        """How far outputs may be."""
        return max(self.rounding, EIGHT_BITS) if self.in_eight_bits else self.rounding

    @property
    def in_eight_bits(self) -> bool:
        """Whether factors may be rounded to 8 bits, where the CPU has such products: over 4 columns, or some for K.

        With K and V of few bits (native/cpu/pairs.h), or with K as integers (native/cpu/key-integers.h).
        """
        n_columns = getattr(self, "n_ubatch", self.n_tokens) * self.n_head // self.n_head_kv
        few_bits = not {"f32", "f16"} & {self.type_k, self.type_v}
        return (n_columns > 4 and few_bits) or (n_columns > FLOAT_COLUMNS and self.type_k in ("q8_0", "q4_0"))

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim_k**-0.5))

    def make_rope(self) -> Rope:
        return Rope(**{"n_dims": self.head_dim_k, **self.rope})

    def positions(self) -> list[int]:
        """Return the position of every query: the last rows; queries that come too early look from the first one."""
        return [max(0, self.n_rows - self.n_tokens + t) for t in range(self.n_tokens)]

    def segments(self) -> list[list[Segment]]:
        """Return the segments of every query, equally many for each."""
        if self.random_segments:
            rng = np.random.default_rng(self.seed + 1)
            return [[self._random_segment(rng) for _ in range(self.random_segments)] for _ in range(self.n_tokens)]
        return [self.method.segments(p) for p in self.positions()]

    def _random_segment(self, rng: np.random.Generator) -> Segment:
        row0, row1 = sorted(int(r) for r in rng.integers(0, self.n_rows + 1, 2))
        return Segment(row0, row1 if rng.random() < 0.8 else row0, int(rng.integers(0, 2 * self.n_rows)))


def _factors(n_dims: int) -> np.ndarray:
    return np.linspace(1.0, 8.0, n_dims // 2, dtype=np.float32)


YARN = {"freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 64}
ROPES = {
    "norm": {},
    "neox": {"mode": NEOX},
    "norm-partial": {"n_dims": 32},
    "neox-partial": {"mode": NEOX, "n_dims": 48},
    "neox-two-dims": {"mode": NEOX, "n_dims": 2},
    "base": {"freq_base": 500000.0},
    "linear": {"freq_scale": 0.125},
    "attn-factor": {"attn_factor": 1.25},
    "factors": {"freq_factors": _factors(64)},
    "neox-partial-factors": {"mode": NEOX, "n_dims": 32, "freq_factors": _factors(32)},
    "yarn": YARN,
    "yarn-neox": YARN | {"mode": NEOX},
    "yarn-half": YARN | {"ext_factor": 0.5, "attn_factor": 0.75},
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "n_ctx_orig": 256},
    "yarn-partial-factors": YARN | {"mode": NORM, "n_dims": 32, "freq_factors": _factors(32)},
}

METHODS = {
    "full": Full(),
    "window": Window(4, 64),
    "window-no-sink": Window(0, 33),
    "window-one": Window(1, 1),
    "selfextend": SelfExtend(4, 32),
    "selfextend-odd": SelfExtend(7, 45),
    "dca": DualChunk(48, 16),
    "dca-odd": DualChunk(29, 11),
    "dca-one": DualChunk(1, 1),
    "string": ShiftedRotary(64, 16),
    "string-odd": ShiftedRotary(29, 11),
    "string-one": ShiftedRotary(1, 1),
}


def _shapes() -> list[OpCase]:
    sizes = [(rows, tokens) for rows in (1, 63, 64, 65, 257) for tokens in (1, 2, 7, 64, 65)]
    return [OpCase(f"rows{r}-tokens{t}", n_rows=r, n_tokens=t, n_threads=1 + t % 2) for r, t in sizes]


def _heads() -> list[OpCase]:
    dims = [(d, d) for d in (8, 40, 64, 80, 96, 128, 256, 512)] + [
        (64, 128),
        (128, 64),
        (40, 8),
        (192, 128),
        (576, 512),
        (264, 520),
    ]
    heads = [(1, 1), (8, 8), (2, 1), (6, 2), (8, 1)]
    return [
        *(OpCase(f"dim{k}x{v}", n_rows=131, head_dim_k=k, head_dim_v=v) for k, v in dims),
        *(OpCase(f"decode-dim{k}x{v}", n_rows=131, n_tokens=1, head_dim_k=k, head_dim_v=v) for k, v in dims),
        *(OpCase(f"heads{h}x{kv}-threads{n}", n_head=h, n_head_kv=kv, n_threads=n) for h, kv in heads for n in (1, 2)),
    ]


def _types() -> list[OpCase]:
    names = ("f32", "f16", "q8_0")
    pairs = [(k, v) for k in names for v in names]
    dims = (64, 96, 256)
    all_types = [(name, name) for name in TOLERANCE]
    return [
        *(OpCase(f"k-{k}-v-{v}-dim{d}-tokens{t}", 257, t, head_dim_k=d, head_dim_v=d, type_k=k, type_v=v)
          for k, v in pairs for d in dims for t in (1, 7)),
        *(OpCase(f"columns{c}-k-{k}-v-{v}", n_rows=131, n_tokens=1, n_head=c, n_head_kv=1, type_k=k, type_v=v)
          for k, v in [*all_types, ("q4_0", "f16"), ("f32", "q4_1")] for c in (1, 2, 3, 5, 6, 7, 8, 9)),
    ]  # fmt: skip


def _prompts() -> list[OpCase]:
    """Return cases with tiles of many columns in f16: whole ones and others, and the last block of rows in any part."""
    sizes = [(63, 64, 1), (64, 128, 4), (65, 112, 7), (129, 40, 4), (257, 128, 7), (257, 64, 1), (577, 128, 4)]
    return [
        OpCase(f"prompt-f16-rows{r}-dim{d}-heads{h}", n_rows=r, n_tokens=min(r, 77), head_dim_k=d, head_dim_v=d,
               n_head=2 * h, n_head_kv=2, type_k="f16", type_v="f16")
        for r, d, h in sizes
    ]  # fmt: skip


def _few() -> list[OpCase]:
    """Return cases with few columns: several tokens of a tile, odd numbers of rows and of dimensions, ends of pages."""
    sizes = [(rows, tokens) for rows in (1, 2, 3, 5, 17, 63, 64, 66, 127) for tokens in (1, 3)]
    dims = [(32, 64), (48, 16), (64, 144), (80, 80), (96, 32), (8, 24), (20, 64), (64, 20)]
    return [
        *(OpCase(f"few-rows{r}-tokens{t}", n_rows=r, n_tokens=t, n_head=2, n_head_kv=1) for r, t in sizes),
        *(OpCase(f"few-dim{k}x{v}", n_rows=67, n_tokens=1, n_head=3, n_head_kv=1, head_dim_k=k, head_dim_v=v)
          for k, v in dims),
        OpCase("few-softcap", n_rows=130, n_tokens=2, n_head=3, n_head_kv=1, softcap=5.0, sharpness=4.0),
        OpCase("few-segments", n_rows=260, n_tokens=2, n_head=2, n_head_kv=1, random_segments=4, seed=3, type_k="q8_0"),
        OpCase("few-selfextend-bf16", n_rows=200, n_tokens=2, n_head=2, n_head_kv=1, near_rows=64, type_k="bf16",
               method=SelfExtend(4, 32)),
    ]  # fmt: skip


def _ropes() -> list[OpCase]:
    return [OpCase(f"rope-{name}", n_rows=130, rope=rope) for name, rope in ROPES.items()]


def _methods() -> list[OpCase]:
    sizes = [(1, 1), (64, 64), (65, 1), (257, 7), (321, 65)]
    base = [
        OpCase(f"{name}-rows{r}-tokens{t}", n_rows=r, n_tokens=t, method=method)
        for name, method in METHODS.items() if name != "full" for r, t in sizes
    ]  # fmt: skip
    near = [replace(c, near_rows=_ring(c)) if isinstance(c.method, SelfExtend) else c for c in base]
    last = [c for c in near if c.n_rows == 321]
    return [
        *near,
        *(replace(c, name=f"{c.name}-q8_0-threads2", type_k="q8_0", type_v="q8_0", n_threads=2) for c in last),
        *(replace(c, name=f"{c.name}-f16-neox", type_k="f16", type_v="f16", rope=ROPES["neox"]) for c in last),
        *(replace(c, name=f"{c.name}-yarn", rope=ROPES["yarn"]) for c in last),
    ]


def _ring(case: OpCase) -> int:
    """Return the smallest ring that still holds every near key of every query."""
    need = case.method.neighbor_window + case.n_tokens
    return -(-need // PAGE_ROWS) * PAGE_ROWS


def _corners() -> list[OpCase]:
    return [
        OpCase("softcap", softcap=2.0),
        OpCase("softcap-decode", n_rows=257, n_tokens=1, softcap=20.0, sharpness=4.0),
        OpCase("no-lse", lse=False),
        OpCase("no-lse-decode", n_tokens=1, n_rows=300, n_threads=2, lse=False),
        OpCase("sharp", sharpness=8.0, n_rows=257),
        OpCase("flat", sharpness=0.0),
        *(OpCase(f"segments{n}-threads{1 + n % 2}", n_rows=257, random_segments=n, seed=n, n_threads=1 + n % 2)
          for n in (1, 2, 3, 8)),
        *(OpCase(f"segments{n}-decode", n_rows=700, n_tokens=1, random_segments=n, seed=n, n_threads=2)
          for n in (1, 2, 5)),
        OpCase("segments-q8_0", n_rows=257, random_segments=5, seed=5, type_k="q8_0", type_v="q8_0"),
    ]  # fmt: skip


# (block of K, block of V) of a head: as a context stores it, K or V alone, and other blocks
BLOCKS = {(64, 64): [(64, 64), (0, 64), (64, 0), (32, 32)], (96, 96): [(32, 32)], (128, 64): [(128, 64), (64, 32)],
          (256, 256): [(256, 64), (64, 256)], (192, 128): [(64, 64)], (40, 32): [(0, 32)]}  # fmt: skip
STORED = [("q4_0", "q4_0"), ("iq4_nl", "iq4_nl"), ("q8_0", "q4_1"), ("q5_1", "f16"), ("f32", "f32")]


def _transformed() -> list[OpCase]:
    """Return cases with rows stored transformed. Any type can be; of floats only rounding is left."""
    shapes = [
        OpCase(f"hadamard-dim{dim_k}x{dim_v}-{k}-{v}-tokens{t}", 131, t, dim_k, dim_v, hadamard_k=k, hadamard_v=v)
        for (dim_k, dim_v), blocks in BLOCKS.items() for k, v in blocks for t in (1, 7)
    ]  # fmt: skip
    base = OpCase("hadamard", n_rows=257, hadamard_k=64, hadamard_v=64)
    return [
        *shapes,
        *(replace(base, name=f"hadamard-k-{k}-v-{v}-tokens{t}", type_k=k, type_v=v, n_tokens=t)
          for k, v in STORED for t in (1, 7, 65)),
        *(replace(base, name=f"hadamard-{name}", type_k="q8_0", type_v="q8_0", rope=ROPES[name])
          for name in ("neox", "neox-partial", "yarn-partial-factors")),
        *(replace(base, name=f"hadamard-selfextend-tokens{t}", n_tokens=t, near_rows=128, method=SelfExtend(7, 45),
                  type_k="q4_0", n_threads=2) for t in (1, 65)),
        replace(base, name="hadamard-segments", random_segments=5, seed=5, type_k="q8_0", type_v="q8_0"),
        replace(base, name="hadamard-softcap", softcap=2.0, type_v="q8_0"),
    ]  # fmt: skip


OP_CASES = [
    *_shapes(),
    *_heads(),
    *_types(),
    *_prompts(),
    *_few(),
    *_ropes(),
    *_methods(),
    *_corners(),
    *_transformed(),
]

# Model-level cases: (method, number of tokens) for a model trained on 64 positions.
N_CTX_TRAIN = 64
MODEL_CASES = {
    "full": (Full(), 200),
    "window": (Window(4, 32), 200),
    "window-no-sink": (Window(0, 17), 150),
    "window-largest": (Window(4, 60), 200),
    "selfextend-2": (SelfExtend(2, 16), 112),
    "selfextend-4": (SelfExtend(4, 16), 200),
    "selfextend-8": (SelfExtend(8, 32), 200),
    "selfextend-odd": (SelfExtend(7, 13), 200),
    "selfextend-wide": (SelfExtend(16, 48), 200),
    "dca": (DualChunk(48, 16), 200),
    "dca-odd": (DualChunk(29, 11), 200),
    "dca-half": (DualChunk(32, 32), 150),
    "dca-narrow": (DualChunk(63, 1), 200),
    "string": (ShiftedRotary(48, 9), 103),
    "string-odd": (ShiftedRotary(29, 11), 82),
    "string-narrow": (ShiftedRotary(21, 1), 84),
    "string-farthest": (ShiftedRotary(64, 1), 127),
}
