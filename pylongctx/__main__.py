"""``python -m pylongctx``."""

import sys

from pylongctx.cli import main

if __name__ == "__main__":
    sys.exit(main())
