"""`python lab/sample.py` imports this file in place of the folder support/. It says what to type.

Every command imports support.cli before all other modules of ours. So it does in the folder lab/.
"""
import shlex
import sys
from pathlib import Path

raise SystemExit(f"error: run python -m lab.{Path(sys.argv[0]).stem} in the repository's folder, "
                 "or outside of it with "
                 f"PYTHONPATH={shlex.quote(str(Path(__file__).parent.parent))}")
