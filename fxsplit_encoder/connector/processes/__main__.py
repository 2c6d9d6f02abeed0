"""The command of an encoder process. `ProcessEncoder` runs it; by hand it is of no use."""

import sys

from fxsplit_encoder.connector.processes.child import main

sys.exit(main(sys.argv[1:]))
