"""Settings for all tests, made before anything imports triton or compiles."""
import os
import tempfile

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", "0" if DEVICE == "cuda" else "1")

# The tests' own cache: torch's cannot tell two layouts of one operator apart.
INDUCTOR = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR.name
