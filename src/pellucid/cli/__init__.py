"""The `pellucid` command: one file a subcommand. Results go to stdout, progress to stderr, an error is one line.

Exit status: 0 done, 1 a bug of ours (with a traceback), 2 something for the user to change, 130 interrupted.
"""

from __future__ import annotations

import sys

from pellucid.cli.app import COMMANDS, build_app
from pellucid.core.errors import PellucidError


def main() -> None:
    """Run the command line; what the user can mend is printed as one line, without a traceback."""
    asked = sys.argv[1:2]
    try:
        build_app(asked if asked and asked[0] in COMMANDS else COMMANDS)()
    except PellucidError as error:
        print(f"pellucid: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
