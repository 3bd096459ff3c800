"""Tests of benchmarks/peers.py: weights of other implementations, and a row for each."""
import sys

import pytest
import torch

import multiscreen
from benchmarks import peers
from multiscreen import Config
from support.cli import UsageError
from tests.helpers import read_table, small
from tests.reference import reference_logits

# For each layout: the sign of s_r, the prefix of a layer or tile, the names in OURS's order.
OURS = "W_E s_E s_F W_Q W_K W_V W_G W_O s_w s_r s_O".split()
PROJECTIONS = "q_proj.weight k_proj.weight v_proj.weight g_proj.weight o_proj.weight"
LAYOUTS = [(-1, "layers.{}.block.", f"embed.weight s_E s_F {PROJECTIONS} sw sr sO"),
           (-1, "layers.{}.tiles.{}.",
            f"embedding.weight s_e s_f {PROJECTIONS} screening.s_w screening.s_r s_o"),
           (1, "layers.{}.", "embedding.weight s_E s_F W_Q.weight W_K.weight W_V.weight "
                             "W_G.weight W_O.weight s_w s_r s_O")]


def to_theirs(weights, which):
    """Our weights, entry by entry, in a peer's layout."""
    sign, prefix, names = LAYOUTS[which]
    names, found = dict(zip(OURS, names.split())), {}
    for name, x in weights.items():
        *layer, own = name.split(".")
        if not layer:
            found[names[own]] = x.clone() if own == "W_E" else x.clone().squeeze()
            continue
        H = x.shape[0 if own[0] == "s" or own == "W_O" else 1]
        tiles = [x[t] * (sign if own == "s_r" else 1) if own[0] == "s" else
                 x[t].T if own == "W_O" else x[:, t].T for t in range(H)]
        theirs = prefix + names[own]
        if which == 1:
            found |= {theirs.format(layer[1], t): tile for t, tile in enumerate(tiles)}
        else:
            join = torch.stack if own[0] == "s" else torch.hstack if own == "W_O" else torch.vstack
            found[theirs.format(layer[1])] = join(tiles)
    return {name: x.contiguous() for name, x in found.items()}


@pytest.mark.parametrize("which", range(3))
def test_weights_of_each_peer_become_ours(which):
    weights = small(moved=True, N_H=2, N_L=3, d_K=4, d_V=5).state_dict()
    theirs = to_theirs(weights, which)
    for found in (theirs, {f"multiscreen.{name}": x for name, x in theirs.items()}):
        ours = peers.to_ours(found.items(), LAYOUTS[which][0])
        assert ours.keys() == weights.keys()
        assert all(torch.equal(x, weights[name]) for name, x in ours.items())


class Reference(torch.nn.Module):
    """tests/reference.py as a peer's model; the peer's package is called multiscreen, too."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        p = small(moved=True, **vars(config)).state_dict()
        self.p = torch.nn.ParameterDict({name.replace(".", "/"): x for name, x in p.items()})

    def by_name(self):
        return {name.replace("/", "."): x for name, x in self.p.items()}

    def named_parameters(self, *args, **options):
        return to_theirs(self.by_name(), 2).items()

    def forward(self, tokens):
        return torch.stack([reference_logits(self.by_name(), self.config, x) for x in tokens])


class Known(peers.Peer):
    folder, sign = "known", 1

    def build(self, package, psi):
        assert package.theirs and package is not multiscreen is sys.modules["multiscreen"]
        return Reference(Config(psi, peers.VOCABULARY))

    def decode(self, tokens, seen):
        seen = tokens if seen is None else torch.cat((seen, tokens), 1)
        return self(seen)[:, -1], seen


@pytest.mark.usefixtures("quick_choice")
def test_a_row_for_each_setting_beside_each_peer_that_is_there(tmp_path, monkeypatch):
    settings = [("train", "eager", 6), ("decode", "eager", 5)]
    for name, value in {"PEERS": [Known, peers.DieOD], "SETTINGS": settings, "TOKENS": 12,
                        "STEPS": 1, "DECODED": 1}.items():
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(sys, "argv", ["peers", str(tmp_path), "--psi", "2", "--out",
                                      str(tmp_path / "out")])
    with pytest.raises(UsageError, match="has no repository of a peer"):
        peers.main()
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "multiscreen.py").write_text("theirs = True\n")
    peers.main()
    rows = read_table(tmp_path / "out" / "peers.tsv")
    assert [(row["peer"], row["what"], row["T"]) for row in rows] == [
        ("Known", "train", "6"), ("Known", "decode", "5")]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(
            float(row["theirs_ms"]) / float(row["ours_ms"]), rel=1e-3)
        assert 0 < float(row["difference"]) < 1e-4
        assert 0 < float(row["ours_MiB"])
