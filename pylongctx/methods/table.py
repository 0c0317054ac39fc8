"""The table of the methods, by name."""

from pylongctx.methods.base import Method
from pylongctx.methods.corm import Corm
from pylongctx.methods.dca import DualChunk
from pylongctx.methods.full import Full
from pylongctx.methods.h2o import H2O
from pylongctx.methods.kvzip import Kvzip
from pylongctx.methods.longheads import LongHeads
from pylongctx.methods.scissorhands import Scissorhands
from pylongctx.methods.selfextend import SelfExtend
from pylongctx.methods.snapkv import SnapKV
from pylongctx.methods.string import ShiftedRotary
from pylongctx.methods.tova import Tova
from pylongctx.methods.window import Window

CLASSES: tuple[type[Method], ...] = (
    Full,
    Window,
    SelfExtend,
    LongHeads,
    DualChunk,
    ShiftedRotary,
    Corm,
    H2O,
    Scissorhands,
    Tova,
    Kvzip,
    SnapKV,
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in CLASSES}
REMOVED = {"triattention": "use h2o or kvzip"}  # what to use instead
