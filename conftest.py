"""How many examples Hypothesis draws: `pytest` a few, `pytest --hypothesis-profile=nightly` 200.

Each run draws other examples. A failure prints what draws it again.
"""
import os

import torch
from hypothesis import settings

# screening_triton reads it when it is imported, by whichever test comes first.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
torch.set_num_threads(1)                               # on small tensors a second one costs time

# derandomize is given because Hypothesis turns it on by itself where the variable CI is set.
FRESH = settings(deadline=None, derandomize=False, print_blob=True)
settings.register_profile("quick", FRESH, max_examples=40)
settings.register_profile("nightly", FRESH, max_examples=200)
settings.load_profile("quick")
