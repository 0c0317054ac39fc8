"""Run programs that import llama_cpp on pylongctx: call ``enable()`` before they import it.

It is for frameworks that import llama_cpp themselves, test ``isinstance(model, llama_cpp.Llama)`` or call llama.cpp's C
functions on ``model.ctx``. ``python -m pylongctx.compat program.py`` runs an unchanged program.
"""

import os
import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pylongctx
from pylongctx._lib import build_info, lib, library_path
from pylongctx.methods import Method, parse

__all__ = ["disable", "enable", "how_to_install"]

LIB_PATH = "LLAMA_CPP_LIB_PATH"
NAMES = [name for name in pylongctx.__all__ if not name.startswith("__")]

_undo = ExitStack()


def how_to_install() -> str:
    """Return the command that installs llama_cpp for this library; it compiles nothing.

    Examples
    --------
    >>> "llama-cpp-python==" in how_to_install()
    True
    """
    package = build_info()["upstream"]
    return f'CMAKE_ARGS="-DLLAMA_BUILD=OFF" pip install --no-cache-dir --no-binary llama-cpp-python {package}'


def enable(method: Method | str | None = None) -> ExitStack:
    """Replace ``llama_cpp`` by pylongctx for everything that is imported from now on.

    The package llama_cpp then loads pylongctx's library, and its classes are those of pylongctx. If it is
    not installed, a module of that name with only the classes takes its place, enough for LangChain; programs that
    call C functions need the package, see ``how_to_install``.

    Parameters
    ----------
    method : Method or str or None
        Method of every ``llama_cpp.Llama`` that is opened without ``method``. None: the environment's LCTX_METHOD.

    Returns
    -------
    contextlib.ExitStack
        ``with enable(): ...`` calls ``disable`` at the end.

    Raises
    ------
    ImportError
        When llama_cpp was imported before with another library, or another version of it is installed.
    ValueError
        When the method is unknown.

    Examples
    --------
    >>> with enable(method="longheads"):
    ...     import llama_cpp
    ...     issubclass(llama_cpp.Llama, pylongctx.Llama)
    True
    """
    global _undo
    if method is not None and not isinstance(method, Method):
        method = parse(method)
    disable()
    with ExitStack() as undo:
        module = _load(undo) if _is_installed() else _stand_in(undo)
        from pylongctx.compat.llama import Llama  # after llama_cpp, whose import would load its own library

        ours = {name: getattr(pylongctx, name) for name in NAMES} | {"Llama": Llama}
        _set(undo, Llama, "default_method", method)
        if module.__spec__ is not None and module.__spec__.loader is None:
            vars(module).update(ours)
        else:
            _rebind(undo, ours)
        _undo = undo.pop_all()
    return _undo


def disable() -> None:
    """Restore ``llama_cpp``; objects created in between stay as they are.

    Examples
    --------
    >>> enable(method="longheads").close()  # the same as disable()
    >>> disable()
    """
    _undo.close()


def _is_installed() -> bool:
    return "llama_cpp.llama_cpp" in sys.modules or find_spec("llama_cpp") is not None


def _load(undo: ExitStack) -> ModuleType:
    """Return the package llama_cpp, loaded on pylongctx's library."""
    if "llama_cpp.llama_cpp" not in sys.modules:
        _check_version()
        undo.callback(_restore_variable, os.environ.get(LIB_PATH))
        os.environ[LIB_PATH] = str(library_path().parent)
    module = import_module("llama_cpp")
    loaded = module.llama_cpp._lib._name  # noqa: SLF001 - that of llama_cpp
    if not os.path.samefile(loaded, library_path()):
        raise ImportError(
            f"llama_cpp was imported before, with the library {loaded}: call pylongctx.compat.enable() before anything "
            "imports llama_cpp, or start the program with 'python -m pylongctx.compat program.py'"
        )
    lib.lctx_log_set_level(2)  # the import has installed a log callback that prints everything
    return module


def _check_version() -> None:
    found, wanted = version("llama-cpp-python"), build_info()["upstream"].partition("==")[2]
    if found != wanted:
        raise ImportError(
            f"llama-cpp-python {found} is installed, but pylongctx has the functions and structs of {wanted}; "
            f"without compiling anything: {how_to_install()}"
        )


def _restore_variable(value: str | None) -> None:
    os.environ.pop(LIB_PATH)
    if value is not None:
        os.environ[LIB_PATH] = value


def _stand_in(undo: ExitStack) -> ModuleType:
    """Return a module ``llama_cpp`` with only the classes."""
    module = ModuleType("llama_cpp", "The classes of pylongctx under the names of llama_cpp.")
    module.__spec__ = ModuleSpec("llama_cpp", None)
    module.__getattr__ = _missing  # type: ignore[method-assign]
    sys.modules["llama_cpp"] = module
    undo.callback(sys.modules.pop, "llama_cpp", None)
    return module


def _missing(name: str) -> Any:
    reason = f"llama_cpp.{name} needs the package llama-cpp-python, which is not installed: {how_to_install()}"
    raise AttributeError(reason)


def _rebind(undo: ExitStack, ours: dict[str, Any]) -> None:
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "llama_cpp":
            for name in ours.keys() & vars(module).keys():
                _set(undo, module, name, ours[name])


def _set(undo: ExitStack, target: Any, name: str, value: Any) -> None:
    undo.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)
