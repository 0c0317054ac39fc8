"""Plans in TOML: every method with every KV type and length on every task, as cells.

RoPE scalings as baselines: the arguments of Llama that a name, a text length and a model stand for.

With s = length / trained length: ``linear`` divides positions by s (Position Interpolation, Chen et al., arXiv
2306.15595). ``ntk`` raises the base to base * s^(d / (d - 2)), d the rotated channels of a head (NTK-aware scaling,
bloc97, 2023; YaRN's section 3.1, arXiv 2309.00071). ``dynamic`` is the same with the length of the text itself, the
"Dynamic NTK" of Emozilla, 2023, that LongHeads and SelfExtend compare with. ``yarn`` is llama.cpp's, with s and the
trained length (arXiv 2309.00071). All but ``dynamic`` are fixed for the longest text, as they are in use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pylongctx._enums import ROPE_SCALINGS
from pylongctx.catalog import CATALOG, resolve
from pylongctx.eval.haystack import SYNTHETIC
from pylongctx.eval.needle import PASSKEY
from pylongctx.eval.registry import TASKS, task_class
from pylongctx.eval.runner import Cell
from pylongctx.eval.task import Chat, Task
from pylongctx.llama import Llama
from pylongctx.methods import METHODS, NONE, Full, named
from pylongctx.models import embedded_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError as reason:
        raise ImportError("plans need the package tomli: pip install 'pylongctx[cli]'") from reason

DEFAULT_BASE = 10000.0
LINEAR, YARN = ROPE_SCALINGS["linear"], ROPE_SCALINGS["yarn"]  # of rope_scaling_type


@dataclass(frozen=True)
class Positions:
    """Properties of a model that RoPE scalings depend on.

    Attributes
    ----------
    n_ctx_train : int
        Trained length.
    n_rot : int
        Rotated channels of a head.
    base : float
        Base of the angles.
    scaled : str
        The scaling that the model was made with, "" for none.
    """

    n_ctx_train: int
    n_rot: int
    base: float = DEFAULT_BASE
    scaled: str = ""


def positions_of(llm: Llama) -> Positions:
    """Return the positions of a model from its metadata.

    Examples
    --------
    >>> positions_of(llm).n_ctx_train
    512
    """
    meta = llm.metadata
    arch = meta["general.architecture"]

    def number(name: str, default: float) -> float:
        return float(meta.get(f"{arch}.{name}", default))

    n_head = number("attention.head_count", 1)
    n_rot = number("rope.dimension_count", number("attention.key_length", number("embedding_length", 0) / n_head))
    scaled = meta.get(f"{arch}.rope.scaling.type", "none")
    base = number("rope.freq_base", DEFAULT_BASE)
    return Positions(int(number("context_length", 0)), int(n_rot), base, "" if scaled == "none" else scaled)


def ntk_base(base: float, n_rot: int, factor: float) -> float:
    """Return the base with which the slowest channel turns ``factor`` times slower, the fastest as before.

    Examples
    --------
    >>> round(ntk_base(10000.0, n_rot=128, factor=4))
    40890
    """
    return float(base * factor ** (n_rot / (n_rot - 2)))


def _ntk(model: Positions, factor: float) -> dict[str, Any]:
    return {"rope_freq_base": ntk_base(model.base, model.n_rot, factor)}


def _linear(model: Positions, factor: float) -> dict[str, Any]:
    return {"rope_scaling_type": LINEAR, "rope_freq_scale": 1 / factor}


def _yarn(model: Positions, factor: float) -> dict[str, Any]:
    return {
        "rope_scaling_type": YARN,
        "rope_freq_scale": 1 / factor,
        "yarn_orig_ctx": model.n_ctx_train,
    }


SCALINGS: dict[str, Callable[[Positions, float], dict[str, Any]]] = {
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _ntk,
    "yarn": _yarn,
}


def scaling(name: str, model: Positions, length: int, longest: int) -> dict[str, Any]:
    """Return the arguments of Llama; none where the text is not longer than the trained length.

    Raises
    ------
    ValueError
        When the name is unknown, or the model was made with a scaling of its own.

    Examples
    --------
    >>> scaling("yarn", Positions(4096, 128), length=8192, longest=16384)
    {'rope_scaling_type': 2, 'rope_freq_scale': 0.25, 'yarn_orig_ctx': 4096}
    """
    if name not in SCALINGS:
        raise ValueError(f"unknown rope scaling {name!r}; available: {', '.join(SCALINGS)}")
    if model.scaled:
        raise ValueError(f"the model is made with rope scaling {model.scaled!r}; {name!r} on top of it means nothing")
    factor = (length if name == "dynamic" else longest) / model.n_ctx_train
    return SCALINGS[name](model, factor) if factor > 1 else {}


# ---- the matrix ----

ALL = "all"
# fields of tasks that name files, from the folder of the TOML file on
FILES = ("file", "data", "haystack", "repository")
GENERATED = ("sentences", SYNTHETIC)  # haystacks that are not files
KEYS = ("model", "methods", "kv", "lengths", "seed", "chat", "llama", "settings", "tasks")
OF_SETTINGS = ("methods", "kv", "compress", "llama")


@dataclass(frozen=True)
class PlannedTask:
    """A task with its lengths, methods and KV types.

    Attributes
    ----------
    methods : tuple of str
        Spec strings, a RoPE scaling after ``@``: ``"longheads@ntk"``; ``"ntk"`` is ``"full@ntk"``.
    kv : tuple of str
        Types of K and V: ``"q8_0"``, ``"q8_0/f16"``.
    chat, reuse, compress : bool or Chat, bool, float
        As of ``Cell``.
    options : dict
        Arguments of Llama that the task's setting adds to those of the plan.
    """

    task: Task
    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    kv: tuple[str, ...]
    chat: bool | Chat = False
    reuse: bool = False
    compress: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> set[tuple[object, ...]]:
        """Method, KV type and compression of each row of a table."""
        return {(method, kv, self.compress) for method in self.methods for kv in self.kv}


@dataclass(frozen=True)
class Matrix:
    """Models, tasks and options of a measurement.

    Attributes
    ----------
    models : tuple of str
        GGUF files.
    options : dict
        Other arguments of Llama.
    """

    models: tuple[str, ...]
    tasks: tuple[PlannedTask, ...]
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """The longest text, for which RoPE scalings are fixed."""
        return max(length for wanted in self.tasks for length in wanted.lengths)

    def cells(self) -> list[Cell]:
        """Return one cell for each model, task, length, KV type and method."""
        known = {model: read_positions(model) for model in self.models}
        grid = [(model, wanted, n) for model in self.models for wanted in self.tasks for n in wanted.lengths]
        return [
            self._cell(known[model], (model, wanted, n), kv, m)
            for model, wanted, n in grid
            for kv in wanted.kv
            for m in wanted.methods
        ]

    def _cell(self, known: Positions, where: Sequence[Any], kv: str, method: str) -> Cell:
        model, wanted, length = where
        spec, rope = split_method(method)
        type_k, _, type_v = kv.partition("/")
        more = scaling(rope, known, length, self.longest) if rope else {}
        options = {**self.options, **wanted.options, **more}
        types, shared = (type_k, type_v or type_k), (wanted.reuse, wanted.compress)
        return Cell(model, spec, wanted.task, length, self.seed, *types, wanted.chat, options, rope, *shared)


def read_positions(model: str) -> Positions:
    """Return the properties of a GGUF file that RoPE scalings depend on."""
    with Llama(model, vocab_only=True, verbose=False) as llm:
        return positions_of(llm)


def split_method(text: str) -> tuple[str, str]:
    """Return the spec string and the RoPE scaling of ``"longheads@ntk"``, "" for none."""
    spec, _, rope = text.partition("@")
    if spec in SCALINGS:
        spec, rope = "full", spec
    if rope and rope not in SCALINGS:
        raise ValueError(f"{text!r}: unknown rope scaling {rope!r}; available: {', '.join(SCALINGS)}")
    return str(named(spec) or NONE), rope


def all_methods() -> list[str]:
    """Return the methods that ``"all"`` means: every RoPE scaling, every method, and compositions."""
    rule = next(cls.name for cls in METHODS.values() if cls.role == "rule")
    alone = [cls for cls in METHODS.values() if cls is not Full]
    composed = [f"{cls.name}+{rule}" for cls in alone if cls.role == "base"]
    return [Full.name, *SCALINGS, *(cls.name for cls in alone), "longheads@dynamic", *composed]


# ---- reading ----


def read(path: str, data: str | None = None) -> dict[str, Any]:
    """Return the table of a TOML file; files are named from the folder of the data on, else from that of the file."""
    folder = Path(path).parent
    folders = [Path(data), folder] if data else [folder]
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as reason:
        raise ValueError(f"{path}: {reason}") from reason
    if "model" in table:
        table["model"] = [_model(folder, model) for model in _list(table["model"])]
    for task in table.get("tasks", []):
        task |= {name: _from(folders, task[name]) for name in FILES if task.get(name, GENERATED[0]) not in GENERATED}
    return table


def _model(folder: Path, name: str) -> str:
    """Return a file of the folder, or a name of the catalogue, if no file has it."""
    path = folder / name
    return name if name in CATALOG and not path.is_file() else str(path)


def _from(folders: Sequence[Path], named: Any) -> Any:
    if isinstance(named, dict):
        return {key: _from(folders, name) for key, name in named.items()}
    if not isinstance(named, str):
        return [str(_from(folders, name)) for name in named]
    return str(next((folder / named for folder in folders if (folder / named).exists()), folders[0] / named))


def with_texts(tasks: Sequence[Mapping[str, Any]], files: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tables of tasks with other texts: all for what takes several, the first one as a haystack."""
    given = {"file": list(files), "haystack": files[0]}
    return [{**task, **{k: given[k] for k in given if task.get(k, GENERATED[0]) not in GENERATED}} for task in tasks]


def make(table: Mapping[str, Any]) -> Matrix:
    """Return the matrix of a table as ``read`` returns it.

    Raises
    ------
    ValueError
        When a key, a task, a method or a value is unknown, or there is no task.
    """
    _check_keys("a matrix", table, KEYS)
    usual = {"lengths": [], "methods": ALL, "kv": "f16", "chat": False}
    common = {name: table.get(name, value) for name, value in usual.items()}
    _methods(common["methods"])  # unknown names are an error even if every task has its own
    settings = table.get("settings", [{}])
    tasks = [
        wanted
        for entry in table.get("tasks", [])
        for setting in entry.get("settings", [{}] if "methods" in entry else settings)
        for wanted in _tasks({**common, **entry}, setting)
    ]
    if not tasks:
        raise ValueError('there is no task; add [[tasks]] with kind = "passkey" to the file, or --task passkey')
    _check_distinct(tasks)
    return Matrix(
        models=tuple(map(resolve, _list(table.get("model", str(embedded_model()))))),
        tasks=tuple(tasks),
        seed=table.get("seed", 0),
        options={"verbose": False} | table.get("llama", {}),
    )


def _methods(words: Any) -> tuple[str, ...]:
    """Return the methods that are named, "all" written out, each once."""
    named = [name for word in _list(words) for name in (all_methods() if word == ALL else [word])]
    return tuple({split_method(name): name for name in named}.values())


def _tasks(entry: Mapping[str, Any], setting: Mapping[str, Any]) -> list[PlannedTask]:
    """Return the tasks of one entry with a setting: one, or one for each of several names."""
    _check_keys("a setting", setting, OF_SETTINGS)
    values = {**entry, **setting}
    values.pop("settings", None)
    options = values.pop("llama", {})
    kind, lengths = values.pop("kind", None), tuple(_list(values.pop("lengths")))
    methods, kv, chat = _methods(values.pop("methods")), tuple(_list(values.pop("kv"))), _chat(values.pop("chat"))
    if kind not in TASKS:
        raise ValueError(f"a task has no kind {kind!r}; available: {', '.join(TASKS)}")
    if not lengths:
        raise ValueError(f"the task {kind!r} has no lengths; add lengths = [512, 2048]")
    if not methods:
        raise ValueError(f'the task {kind!r} has no methods; add methods = ["full", "longheads"]')
    if not kv:
        raise ValueError(f'the task {kind!r} has no KV types; add kv = ["f16"]')
    if kind == "needle" and values.pop("passkey", False):
        values = PASSKEY | values
    known = {part.name: str(part.type) for part in fields(task_class(kind)) if part.init}  # type: ignore[arg-type]
    shared = (values.pop("reuse", False), 1.0 if "compress" in known else values.pop("compress", 1.0))
    _check_keys(f"a task of kind {kind!r}", values, [*known])
    each = _each_name(kind, values)
    for name in (name for name, value in values.items() if isinstance(value, list) and "tuple" not in known[name]):
        raise ValueError(f"a task of kind {kind!r} has one {name}, not a list; give each its own [[tasks]]")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    made = [task_class(kind)(**values, **own) for own in each]
    return [PlannedTask(task, lengths, methods, kv, chat, *shared, options) for task in made]


def _chat(wanted: Any) -> bool | Chat:
    """Return whether prompts have the chat template, or how."""
    if not isinstance(wanted, Mapping):
        return bool(wanted)
    _check_keys("chat", wanted, ("reasoning", "variables"))
    return Chat(bool(wanted.get("reasoning", False)), json.dumps(dict(wanted.get("variables", {})), sort_keys=True))


def _each_name(kind: str, values: dict[str, Any]) -> list[dict[str, str]]:
    """Take the names out of a task's values, and files by name; return the fields of each name."""
    is_named, names = "name" in values, _list(values.pop("name", []))
    files = values.pop("data") if isinstance(values.get("data"), dict) else {}
    if unknown := [name for name in files if name not in names]:
        raise ValueError(f"a task of kind {kind!r} has data for {unknown[0]!r}, which is not one of its names; add it")
    each = [{"name": name} | ({"data": files[name]} if name in files else {}) for name in names]
    return each if is_named else [{}]


def _check_distinct(tasks: Sequence[PlannedTask]) -> None:
    """Refuse tasks that a report could not tell apart."""
    found: dict[tuple[object, ...], tuple[PlannedTask, set[tuple[object, ...]]]] = {}
    for wanted, n in ((one, n) for one in tasks for n in one.lengths):
        first, rows = found.setdefault((wanted.task.name, n, getattr(wanted.task, "mode", "")), (wanted, set()))
        twice = rows & wanted.rows
        rows |= wanted.rows
        if (first.task, first.chat) != (wanted.task, wanted.chat) or twice:
            raise ValueError(
                f"two tasks are {wanted.task.name!r} at the same length, tables would mix them; give each its own --out"
            )


def _check_keys(what: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"{what} has no {unknown[0]!r}; available: {', '.join(known)}")


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
