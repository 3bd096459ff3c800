"""The trained model and the measurements that come with the repository."""
import hashlib
import re

from abcdigits import exact_matches, generate_by_token_count
from support.checkpoint import load_checkpoint
from tests.helpers import ROOT, read_table, run


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


def test_the_readme_has_the_means_of_the_report(tmp_path):
    """Its table of retrieval by length is what the command beside it prints."""
    said = run("-m", "experiments.retrieval", ROOT / "experiments/report/results.tsv", "--out",
               tmp_path)
    assert said.returncode == 0, said.stderr
    rows = read_table(tmp_path / "retrieval.tsv")
    readme = (ROOT / "README.md").read_text()
    for shown, model in (("Multiscreen", "Multiscreen"), ("with `--swe`", "Multiscreen + SWE"),
                         ("Transformer", "Transformer")):
        line, = re.findall(rf"^\| {re.escape(shown)} \|(.* %.*)$", readme, re.MULTILINE)
        means = [float(row["mean"].rstrip("%")) for row in rows
                 if row["model"] == model and row["task"].startswith("abcdigits")]
        assert [float(x) for x in re.findall(r"([\d.]+) %", line)] == means
