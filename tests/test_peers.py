"""benchmarks/peers.py: weights of other implementations, their files, a row beside one of them."""
import json
import sys

import pytest
import torch

import multiscreen
from benchmarks import peer_models, peer_weights, peers
from benchmarks.peer_weights import convert, to_ours
from multiscreen import Config
from support.checkpoint import load_checkpoint
from support.cli import UsageError
from tests.helpers import draw_tokens, read_table, small
from tests.reference import reference_logits

LAYERS = ["layers.{}.block.", "layers.{}.tiles.{}.", "layers.{}."]      # as in THEIRS


def to_theirs(weights, which):
    """Our weights in the layout of a peer, entry by entry."""
    sign, names = peer_weights.THEIRS[which]
    names, found = dict(zip(peer_weights.OURS, names.split())), {}
    for name, x in weights.items():
        *layer, own = name.split(".")
        if not layer:
            found[names[own]] = x.clone() if own == "W_E" else x.clone().squeeze()
            continue
        H = x.shape[0 if own[0] == "s" or own == "W_O" else 1]
        tiles = [x[t] * (sign if own == "s_r" else 1) if own[0] == "s" else
                 x[t].T if own == "W_O" else x[:, t].T for t in range(H)]
        theirs = LAYERS[which] + names[own]
        if which == 1:
            found |= {theirs.format(layer[1], t): tile for t, tile in enumerate(tiles)}
        else:
            join = torch.stack if own[0] == "s" else torch.hstack if own == "W_O" else torch.vstack
            found[theirs.format(layer[1])] = join(tiles)
    return {name: x.contiguous() for name, x in found.items()}


@pytest.mark.parametrize("which", range(3))
def test_weights_of_each_peer_become_ours(which):
    weights = small(far=True, N_H=2, N_L=3, d_K=4, d_V=5).state_dict()
    theirs = to_theirs(weights, which) | {"lm_head.weight": torch.zeros(1)}
    for found in (theirs, {f"multiscreen.{name}": x for name, x in theirs.items()}):
        ours = to_ours(found)
        assert ours.keys() == weights.keys()
        assert all(torch.equal(x, weights[name]) for name, x in ours.items())
    del theirs["s_f" if which == 1 else "s_F"]
    with pytest.raises(UsageError, match="no known peer"):
        to_ours(theirs)


class MultiscreenConfig:
    """What a peer writes into its file as an object."""
    mipe_threshold, max_seq_len = 0.0, 0


MultiscreenConfig.__module__ = "multiscreen.config"


def write_safetensors(path, weights):
    """Tensors in the file format of Hugging Face, in the order of their names."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in sorted(weights.items()):
        end = len(data) + 4 * x.numel()
        header[name] = {"dtype": "F32", "shape": [*x.shape], "data_offsets": [len(data), end]}
        data += x.numpy().tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("which", range(3))
def test_a_checkpoint_of_a_peer_is_one_of_ours(which, tmp_path, monkeypatch):
    model = small(far=True, vocab_size=257, psi=2, N_L=3, d_K=4, d_V=5, w_th=64.0)
    model.layers[0].s_w.data[0] = 3.0                  # was infinite
    theirs, path = to_theirs(model.state_dict(), which), tmp_path / "model.pt"
    if which == 0:
        about = MultiscreenConfig()
        about.mipe_threshold, about.max_seq_len = 64.0, 512
        module = type(sys)("multiscreen.config")
        module.MultiscreenConfig = MultiscreenConfig
        monkeypatch.setitem(sys.modules, "multiscreen.config", module)
        torch.save({"model_state_dict": theirs, "config": about, "step": 3}, path)
        monkeypatch.delitem(sys.modules, "multiscreen.config")
    elif which == 1:
        about = {"mipe_threshold": 64.0, "max_seq_len": 4096, "max_train_seq_len": 512}
        torch.save({"model_state_dict": theirs, "model_config": about, "args": {"out": path}}, path)
    else:
        path = tmp_path / "model.safetensors"
        write_safetensors(path, {f"multiscreen.{name}": x for name, x in theirs.items()})
        about = {"mipe_threshold": 64.0, "max_seq_len": 512}
        path.with_name("config.json").write_text(json.dumps(about))

    monkeypatch.setattr(sys, "argv", ["peers", "--convert", str(path), "--out",
                                      str(tmp_path / "new" / "ckpt.pt")])
    peers.main()
    found, tokenizer, ckpt = load_checkpoint(tmp_path / "new" / "ckpt.pt")
    tokens = draw_tokens(2, 40, n=257)
    assert (tokenizer.name, ckpt["args"]["seq_len"], found.config.w_th) == ("bytes", 512, 64.0)
    with torch.no_grad():
        torch.testing.assert_close(found(tokens), model(tokens), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_converted_says_why(tmp_path):
    path, out = tmp_path / "model.pt", tmp_path / "ckpt.pt"
    torch.save(to_theirs(small(vocab_size=256).state_dict(), 2), path)
    with pytest.raises(UsageError, match="vocabulary of 256"):
        convert(path, out)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="truncated, or not"):
        convert(path, out)
    assert not out.exists()
    with pytest.raises(UsageError, match="name another --out"):
        convert(path, path)


class Reference(torch.nn.Module):
    """tests/reference.py as the model of a peer: its own package is called multiscreen, too."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        p = small(far=True, **vars(config)).state_dict()
        self.p = torch.nn.ParameterDict({name.replace(".", "/"): x for name, x in p.items()})

    def by_name(self):
        return {name.replace("/", "."): x for name, x in self.p.items()}

    def state_dict(self):
        return to_theirs(self.by_name(), 2)

    def forward(self, tokens):
        return torch.stack([reference_logits(self.by_name(), self.config, x) for x in tokens])


class Known(peer_models.Peer):
    folder = "known"

    def build(self, package, psi):
        assert package.theirs and package is not multiscreen is sys.modules["multiscreen"]
        return Reference(Config(psi, peer_models.VOCABULARY))

    def decode(self, tokens, seen):
        seen = tokens if seen is None else torch.cat((seen, tokens), 1)
        return self(seen)[:, -1], seen


def test_a_row_for_each_setting_beside_each_peer_that_is_there(tmp_path, monkeypatch):
    settings = [("train", "eager", 6), ("decode", "eager", 5)]
    for name, value in {"PEERS": [Known, peer_models.DieOD], "SETTINGS": settings, "TOKENS": 12,
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
