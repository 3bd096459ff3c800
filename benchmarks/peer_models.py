"""Models of other public implementations, from their unchanged repositories."""
import importlib
import sys

import torch
from torch.nn.functional import cross_entropy

from multiscreen import Config

VOCABULARY, LONGEST = 257, 2**20                       # bytes; beyond every length that is timed


class Peer(torch.nn.Module):
    """A model of a peer, with random weights. `build` makes it, `decode` reads with a cache."""
    package = "multiscreen"

    def __init__(self, folder, psi):
        super().__init__()
        self.config = Config(psi, VOCABULARY)
        self.model = self.build(import_from(folder / self.folder, self.package), psi)
        for p in self.parameters():                    # s_r is 0 at first, whatever its sign
            p.data += 0.1 * torch.randn_like(p) * (p.dim() < 2)

    def forward(self, tokens):
        found = self.model(tokens)
        return found if torch.is_tensor(found) else found[0]

    def loss(self, tokens, targets):
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class DieOD(Peer):
    folder = "multiscreen-pytorch"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, VOCABULARY, max_seq_len=LONGEST)
        return package.MultiscreenModel(config)

    def decode(self, tokens, seen):
        i, caches = seen or (0, None)
        z, caches = self.model(tokens, i, caches)
        return z[:, -1], (i + tokens.shape[1], caches)


class HuggingFace(Peer):
    folder, package = "Multiscreen-HF", "multiscreen_transformers"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, VOCABULARY, max_seq_len=LONGEST,
                                                    use_cache=False,
                                                    mipe_position_mode="paper_absolute")
        return package.MultiscreenForCausalLM(config).train()

    def decode(self, tokens, seen):
        found = self.model(tokens, past_key_values=seen, use_cache=True)
        return found.logits[:, -1], found.past_key_values


class Exveria(Peer):
    folder, package = "screening-is-enough-pytorch/src", "multiscreen.model"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, vocab_size=VOCABULARY, max_seq_len=LONGEST)
        return package.MultiscreenLM(config)


class FreshMedlar(Peer):
    folder = "screening"

    def build(self, package, psi):
        return package.Multiscreen(VOCABULARY, psi**2, psi, psi)


def import_from(folder, name):
    """A module of a peer. Most are called multiscreen; ours, which is loaded, keeps the name."""
    for old in [old for old in sys.modules if old.startswith("multiscreen.")]:
        del sys.modules[old]
    ours = sys.modules.pop("multiscreen")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules["multiscreen"] = ours


PEERS = DieOD, HuggingFace, Exveria, FreshMedlar
