"""`python -m gpu_bench`; a dry run takes the tests' corrections of Triton's interpreter first."""

import os
import sys

if os.environ.get("TRITON_INTERPRET") == "1":
    import support.triton_shim  # noqa: F401

from gpu_bench.main import main

sys.exit(main())
