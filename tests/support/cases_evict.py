"""Cases of heads that drop rows: see cases.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cases import FEW_TOKENS, FLOAT_COLUMNS, PAPER, ROPES, OpCase
from oracle import DualChunk, Full, Segment, SelfExtend, ShiftedRotary
from oracle_chunks import LongHeads
from oracle_evict import Evicting
from oracle_rules import EDGES, H2O, RULES, Corm, Kvzip, Rule

# How far a score of attention may be off: a decision within that may fall either way. What float32 leaves, and one step
# of a stored channel that rounds the other way.
MARGIN = {"f32": 2e-5, "f16": 1e-3, "q8_0": 2e-3, "q4_0": 3e-2}
# Where single tokens' queries are rounded to 8 bits, for every 32 channels. Votes compute their scores from floats, and
# divide by the sum of attention, whose scores have an error of about 0.5%: 4 times 0.02 of scores whose deviation is 4.
ROUNDED_MARGIN = 0.08

BASES = {
    "full": Full(),
    "selfextend": SelfExtend(5, 33),
    "longheads": LongHeads(16, 96),
    "longheads-paper": LongHeads(16, 96, **PAPER),
    "longheads-group": LongHeads(16, 96, select="group", representation="minmax"),
    "longheads-dca": LongHeads(16, 96, n_recent=0, representation="keys1", position="dca", n_ctx_train=96),
    "dca": DualChunk(37, 19),
    "string": ShiftedRotary(37, 19),
}
TILED = LongHeads(16, 64, tile=64, tile_window=80)


@dataclass(frozen=True)
class EvictCase(OpCase):
    """One call of ``lctx_layer_run`` with a rule; ``method`` is the base."""

    rule: Rule = field(default_factory=lambda: RULES["corm-every16"])
    n_ubatch: int = 64

    @property
    def evicting(self) -> Evicting:
        return Evicting(self.method, self.rule)

    @property
    def tolerance(self) -> float:
        """How far outputs may be: one row, whose key was rounded the other way, may have most of the weight."""
        return 2 * super().tolerance

    @property
    def margin(self) -> float:
        rounded = FLOAT_COLUMNS == 0 and self.type_k in ("q8_0", "q4_0")
        return max(MARGIN[self.type_k], ROUNDED_MARGIN * rounded)

    def segments(self) -> list[list[Segment]]:
        """Return segments that are not read: the layer makes them."""
        return [[Segment(0, 0, 0)]] * self.n_rows


def evict_case(name: str, n_rows: int = 257, sharpness: float = 4.0, **settings) -> EvictCase:
    return EvictCase(name, n_rows=n_rows, n_tokens=n_rows, sharpness=sharpness, **settings)


def compositions(rules: Mapping[str, Rule]) -> list[tuple[str, str]]:
    """Return the names of every base with each of ``rules``."""
    return [(base, rule) for base in BASES for rule in rules]


EVICT_CROSS = [
    evict_case(f"{base}-{rule}", method=BASES[base], rule=RULES[rule], n_threads=1 + len(rule) % 2)
    for base, rule in compositions(RULES)
]  # fmt: skip


def _evict_sizes() -> list[EvictCase]:
    rows = [1, 2, 15, 16, 17, 63, 64, 65, 128, 130, 321]
    heads = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 2)]
    dims = [(64, 64), (80, 80), (128, 128), (40, 40), (64, 128), (128, 64)]
    return [
        *(evict_case(f"rows{n}-{rule}", n_rows=n, rule=RULES[rule]) for n in rows
          for rule in ("corm-every16", "h2o")),
        *(evict_case(f"heads{h}x{kv}-{rule}", n_head=h, n_head_kv=kv, rule=RULES[rule], n_threads=3)
          for h, kv in heads for rule in ("corm", "scissorhands")),
        *(evict_case(f"heads{h}x{kv}-longheads", n_head=h, n_head_kv=kv, method=BASES["longheads"])
          for h, kv in heads),
        *(evict_case(f"dim{k}x{v}", head_dim_k=k, head_dim_v=v) for k, v in dims),
        *(evict_case(f"dim{k}-longheads", head_dim_k=k, head_dim_v=k, method=BASES["longheads"])
          for k in (40, 80, 128)),
    ]  # fmt: skip


def _evict_types() -> list[EvictCase]:
    pairs = [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q4_0"), ("q8_0", "f32")]
    which = [("full", "corm-every16"), ("full", "h2o"), ("selfextend", "corm-unprotected"),
             ("longheads", "corm-every16"), ("longheads-dca", "scissorhands")]  # fmt: skip
    # factors that are rounded once more would decide at near ties, otherwise for every cut into graphs
    typed = [
        evict_case(f"k-{k}-v-{v}-{base}-{rule}", type_k=k, type_v=v, method=BASES[base], rule=RULES[rule],
                   n_ubatch=FEW_TOKENS)
        for k, v in pairs for base, rule in which
    ]  # fmt: skip
    transformed = [replace(case, name=f"hadamard-{case.name}", hadamard_k=64, hadamard_v=64) for case in typed]
    return typed + [case for case in transformed if "q" in case.type_k]


def _evict_corners() -> list[EvictCase]:
    ropes = ("neox", "norm-partial", "yarn", "yarn-partial-factors")
    return [
        *(evict_case(name, rule=rule) for name, rule in EDGES.items()),
        *(evict_case(f"ubatch{n}-{base}", n_ubatch=n, method=BASES[base]) for n in (1, 7, 64, 1000) for base in BASES),
        *(evict_case(f"rope-{rope}-{base}", rope=ROPES[rope], method=BASES[base])
          for rope in ropes for base in ("full", "selfextend", "longheads-dca")),
        *(evict_case(f"softcap-{base}", softcap=6.0, method=BASES[base], rule=Corm(6, 8, 8))
          for base in ("full", "longheads-group")),
        evict_case("empty-chunks", sharpness=8.0, method=LongHeads(16, 96), rule=Corm(4, 4, 4)),
        evict_case("empty-summaries", sharpness=8.0, method=BASES["longheads-paper"], rule=Corm(4, 4, 4)),
        evict_case("long-chunks", method=LongHeads(48, 192), rule=RULES["corm-unprotected"]),
        evict_case("open-chunk-exceeds-the-budget", method=LongHeads(48, 192), rule=H2O(40, 4, 10)),
        *(evict_case(f"tile-{name}", n_rows=321, n_ubatch=128, method=method, rule=rule)
          for name, method, rule in (
              ("corm", TILED, Corm(32, 64, 64)),
              ("h2o", replace(TILED, position="dca", n_ctx_train=96), H2O(128, 32, 64)),
              ("h2o-selfextend", replace(TILED, position="selfextend", n_ctx_train=96, n_ctx=321), H2O(128, 32, 64)),
              ("kvzip", TILED, Kvzip(200, 0.4)),
          )),
    ]  # fmt: skip


EVICT_CASES = [*EVICT_CROSS, *_evict_sizes(), *_evict_types(), *_evict_corners()]
