"""`python -m jaxtp`: the `jaxtp` command."""

import sys

from jaxtp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
