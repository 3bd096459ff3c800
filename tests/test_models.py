"""Tests of the trained model and the measurements in the repository."""
import hashlib
import re

import pytest

from abcdigits import exact_matches, generate_by_token_count
from experiments import retrieval
from support.checkpoint import load_checkpoint, read_checkpoint
from support.source import digest
from tests.helpers import ROOT


def test_the_file_is_the_one_that_is_described():
    said = (ROOT / "models/README.md").read_text()
    found = hashlib.sha256((ROOT / "models/retrieval.pt").read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+)", said)[1] == found


def test_its_source_is_that_of_its_equations():
    ckpt = read_checkpoint(ROOT / "models/retrieval.pt")
    assert digest(ckpt["source"], ckpt["classes"]) == ckpt["equations"]


@pytest.mark.usefixtures("quick_choice")
def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))


def claims_of(path):
    """{number: (finding, verdict)} of a table of claims."""
    rows = re.findall(r"^\| (\d+) \|(?:.*\|)? (.*?) \| (.*?) \|$", path.read_text(), re.MULTILINE)
    return {number: (found, verdict) for number, found, verdict in rows}


def test_the_report_claims_the_means_of_its_tables(call, capsys, monkeypatch):
    """Its claims about retrieval by length match what experiments.retrieval prints."""
    monkeypatch.setattr(retrieval, "pyplot", lambda: None)             # no figures

    def means_of(name):
        call(retrieval, ROOT / f"experiments/report/{name}.tsv", "--out", f"{name}.png")
        found, columns = {}, ()
        for line in capsys.readouterr().out.splitlines():
            model, *row = re.split(" {2,}", line.strip())
            columns = row if model == "model" else columns
            if len(row) == 7 and "x_training" in columns and row[0].isdigit():
                found.setdefault(model, {})[int(row[0])] = float(row[4].rstrip("%"))
        return found

    models, ablations = means_of("abcdigits"), means_of("abcdigits_ablations")
    keys = means_of("passkey")
    claims = claims_of(ROOT / "experiments/report/report.md")

    def percents(n):
        return [float(x) for x in re.findall(r"([\d.]+)(?: ± [\d.]+)? %", claims[n][0])]

    ours, expanded = models["Multiscreen"], models["Multiscreen + SWE"]
    assert percents("14")[:3] == [ours[2048], ours[8192], ours[32768]]
    assert percents("16")[:6] == [found[n] for n in (8192, 16384, 32768)
                                  for found in (expanded, ours)]
    ours, expanded, theirs = (keys[name] for name in
                              ("Multiscreen", "Multiscreen + SWE", "Transformer"))
    assert percents("17") == [expanded[8192], ours[512], ours[1024], ours[2048], ours[4096],
                              ours[8192], theirs[512], theirs[1024]]
    names = ("Original", "MiPE → NoPE", "w/o Gate", "w/o TanhNorm", "Fixed r = 1", "MiPE → RoPE")
    assert percents("22") == [ablations[name + swe][length] for swe, length in
                              (("", 2048), ("", 8192), (" + SWE", 8192)) for name in names]
