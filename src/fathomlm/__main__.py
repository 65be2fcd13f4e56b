"""`python -m fathomlm` is the command `fathomlm`."""

import sys

from fathomlm.cli.main import main

sys.exit(main())
