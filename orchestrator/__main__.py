"""`python -m orchestrator`."""

import sys

try:
    from orchestrator.cli import main
except KeyboardInterrupt:  # Ctrl-C while the imports go on
    sys.exit(130)

sys.exit(main())
