"""Settings and fixtures of all tests in this folder."""
import os
import tempfile

import pytest

import train

# The tests' own cache: torch's cannot tell two layouts of one operator apart.
INDUCTOR = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR.name


@pytest.fixture(scope="session", autouse=True)
def no_samples():
    """Training in a test's own process ends without a sample, which would take longer than it."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(train, "sample", lambda model, data, tokenizer: "")
        yield
