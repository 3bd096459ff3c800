"""The trained model and the measurements that come with the repository."""
import hashlib
import re

from abcdigits import exact_matches, generate_by_token_count
from experiments import retrieval
from support.checkpoint import equations, load_checkpoint, read_checkpoint
from support.source import digest
from tests.helpers import ROOT, needs_matplotlib, read_table


def test_the_file_is_the_one_that_is_described():
    said = (ROOT / "models/README.md").read_text()
    found = hashlib.sha256((ROOT / "models/retrieval.pt").read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+)", said)[1] == found


def test_its_source_is_that_of_its_equations():
    ckpt = read_checkpoint(ROOT / "models/retrieval.pt")
    assert digest(ckpt["source"], ckpt["classes"]) == ckpt["equations"] == equations("multiscreen")


def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))


def claims_of(path):
    """{number: (what was found, verdict)} of a table of claims."""
    rows = re.findall(r"^\| (\d+) \|(?:.*\|)? (.*?) \| (.*?) \|$", path.read_text(), re.MULTILINE)
    return {number: (found, verdict) for number, found, verdict in rows}


def test_the_claims_of_the_readme_are_those_of_the_report():
    """Fewer and shorter: no number and no verdict that the report has not."""
    short, long = (claims_of(ROOT / path) for path in ("README.md", "experiments/report/report.md"))
    short = {n: row for n, row in short.items() if re.search(r"\[\d", row[0])}
    assert len(long) == 22
    assert len(short) > 6

    def numbers(text):
        return set(re.findall(r"[\d.,]*\d", text))

    for n, (found, verdict) in short.items():
        assert numbers(found) <= numbers(long[n][0]), n
        assert long[n][1].startswith(verdict), n


def above_95(label, length):
    """How many seeds of a row of README's first table find 95 % or more at a length."""
    tables = {"Multiscreen": "report/abcdigits", "Softmax": "report/competition",
              "Transformer": "report/abcdigits", "Transformer, local": "report/abcdigits"}
    names = {"Multiscreen": "multiscreen", "Softmax": "multiscreen:softmax",
             "Transformer": "transformer:4,4,96", "Transformer, local": "transformer:4,4,96:local"}
    name, _, swe = label.partition(" + ")
    cells = {}
    for row in read_table(ROOT / f"experiments/{tables[name]}.tsv"):
        if (row["model"], row["length"], bool(row["swe"])) == (names[name], str(length), bool(swe)):
            place = cells.setdefault(row["seed"], {})
            place[row["depth"]] = max(float(row["accuracy"]), place.get(row["depth"], 0))
    return sum(sum(place.values()) / len(place) >= 0.95 for place in cells.values())


@needs_matplotlib
def test_the_report_claims_the_means_of_its_tables(call, capsys):
    """Its claims on retrieval by length are what experiments.retrieval prints."""
    def means_of(name):
        call(retrieval, ROOT / f"experiments/report/{name}.tsv", "--out", f"{name}.png")
        found = {}
        for line in capsys.readouterr().out.splitlines():
            model, *row = re.split(" {2,}", line.strip())
            if len(row) == 7 and row[0].isdigit():
                found.setdefault(model, {})[int(row[0])] = float(row[4].rstrip("%"))
        return found

    models, ablations = means_of("abcdigits"), means_of("abcdigits_ablations")
    first = models | means_of("competition")
    lengths, rows = (256, 2048, 8192, 32768), 0
    for line in (ROOT / "README.md").read_text().splitlines():
        name, *cells = [x.strip() for x in line.strip("|").split("|")]
        if line.startswith("| ") and name in first:
            said = {n: float(x.strip("%")) for n, x in zip(lengths, cells) if x != "-"}
            assert said == {n: first[name][n] for n in said}, name
            found, runs = re.match(r"(\d+) of (\d+)", cells[-1]).groups()
            assert (int(found), runs) == (above_95(name, 8192), cells[-2]), name
            rows += len(said) > 1
    assert rows == 6
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
    names = ("w/o TanhNorm", "w/o Gate", "MiPE → RoPE", "Fixed r = 1", "MiPE → NoPE")
    found = percents("22")
    assert [*found[:2], *found[5:8]] == [ablations[name][2048] for name in names]
