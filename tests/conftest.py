"""Settings of all tests in this folder."""
import os
import tempfile

# The tests' own cache: torch's cannot tell two layouts of one operator apart.
INDUCTOR = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR.name
