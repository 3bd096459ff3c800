"""The trained model and the measurements that come with the repository."""
import hashlib
import re

from abcdigits import exact_matches, generate_by_token_count
from experiments import retrieval
from support.checkpoint import load_checkpoint
from tests.helpers import ROOT, needs_matplotlib


def test_the_file_is_the_one_that_is_described():
    said = (ROOT / "models/README.md").read_text()
    found = hashlib.sha256((ROOT / "models/retrieval.pt").read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+)", said)[1] == found


def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))


@needs_matplotlib
def test_the_readme_has_the_means_of_the_report(call, capsys):
    """Its tables of retrieval by length are what experiments.retrieval prints."""
    def means_of(name):
        call(retrieval, ROOT / f"experiments/report/{name}.tsv", "--out", f"{name}.png")
        found = {}
        for line in capsys.readouterr().out.splitlines():
            model, *row = re.split(" {2,}", line.strip())
            if len(row) == 7 and row[0].isdigit():
                found.setdefault(model, {})[int(row[0])] = float(row[4].rstrip("%"))
        return found

    models, ablations = means_of("abcdigits"), means_of("abcdigits_ablations")
    readme = (ROOT / "README.md").read_text()

    def shown(name):
        line, = re.findall(rf"^\| {re.escape(name)} \|(.* %.*)$", readme, re.MULTILINE)
        return [float(x) for x in re.findall(r"([\d.]+) %", line)]

    for name, model in (("Multiscreen", "Multiscreen"), ("with `--swe`", "Multiscreen + SWE"),
                        ("Transformer", "Transformer")):
        assert shown(name) == [*models[model].values()]
    for name, model in (("the original", "Original"), ("RoPE for MiPE", "MiPE → RoPE"),
                        ("NoPE for MiPE", "MiPE → NoPE"), ("r = 1", "Fixed r = 1"),
                        ("without TanhNorm", "w/o TanhNorm"), ("without the gate", "w/o Gate")):
        assert shown(name) == [*ablations[model].values(), ablations[f"{model} + SWE"][2048]]
