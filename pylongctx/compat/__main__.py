"""Run a program that imports llama_cpp on pylongctx: ``python -m pylongctx.compat program.py ...``."""

import argparse
import runpy
import sys
from pathlib import Path

from pylongctx.compat import enable


def main() -> None:
    """Run the program given on the command line, like Python itself."""
    parser = argparse.ArgumentParser(prog="python -m pylongctx.compat", description=__doc__)
    parser.add_argument("--method", help="method of every llama_cpp.Llama that is opened without one")
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    enable(given.method)
    sys.argv = [given.program, *given.arguments]
    if given.is_module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(given.program).resolve().parent)
        runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
