"""Turn other implementations' weights into ours: transposed, and s_r with the sign of our r."""
import json
import re
from collections import defaultdict
from dataclasses import asdict

import torch

from multiscreen import Config
from support.checkpoint import equations, save_checkpoint
from support.cli import UsageError, require_file

# Ours, and theirs in the same order behind the sign of s_r: most have r = 1 / (exp(s) + 1).
OURS = "W_E s_E s_F W_Q W_K W_V W_G W_O s_w s_r s_O".split()
PROJECTIONS = "q_proj.weight k_proj.weight v_proj.weight g_proj.weight o_proj.weight"
THEIRS = [(-1, f"embed.weight s_E s_F {PROJECTIONS} sw sr sO"),
          (-1, f"embedding.weight s_e s_f {PROJECTIONS} screening.s_w screening.s_r s_o"),
          (1, "embedding.weight s_E s_F W_Q.weight W_K.weight W_V.weight W_G.weight W_O.weight "
              "s_w s_r s_O")]
NAME = re.compile(r"(?:multiscreen\.)?(layers\.\d+\.)?(?:block\.|tiles\.\d+\.)?(.+)")


class Stored:
    """Stands for one of their classes in a file; none of their code is run."""


def to_ours(found):
    """{name: weight} of a peer -> of ours. A layer has one matrix for all tiles, or one for each.

    Raises UsageError if no peer has these names.
    """
    names = {NAME.fullmatch(name)[2] for name in found}
    known = [(sign, theirs.split()) for sign, theirs in THEIRS if names >= set(theirs.split())]
    if not known:
        raise UsageError("no known peer has weights of these names")
    sign, theirs = known[0]
    own, parts = dict(zip(theirs, OURS)), defaultdict(list)
    for name, x in found.items():
        layer, name = NAME.fullmatch(name).groups("")
        if name in own:
            parts[layer, own[name]].append(x.detach().float())

    weights = {}
    for (layer, name), xs in parts.items():
        if name == "W_E":
            x = xs[0]
        elif name.startswith("s_"):
            x = torch.cat([x.flatten() for x in xs]) * (sign if name == "s_r" else 1)
        else:
            H = sum(x.numel() for x in parts[layer, "s_w"])
            if name == "W_O":                          # (E, H V) -> (H, V, E)
                x = torch.cat(xs, 1).unflatten(1, (H, -1)).permute(1, 2, 0)
            else:                                      # (H D, E) -> (E, H, D)
                x = torch.cat(xs).unflatten(0, (H, -1)).permute(2, 0, 1)
        weights[layer + name] = x.contiguous()
    return weights


def read_file(path):
    """({name: weight}, {setting: value}) of a checkpoint: .safetensors, or of torch.save."""
    if path.suffix == ".safetensors":
        about = path.with_name("config.json")
        return read_safetensors(path), json.loads(about.read_text()) if about.exists() else {}
    allowed = [type(path), (Stored, "multiscreen.config.MultiscreenConfig")]
    with torch.serialization.safe_globals(allowed):
        found = torch.load(path, "cpu", weights_only=True)
    about = found.get("model_config") or vars(found.get("config", Stored()))
    return found.get("model_state_dict", found), about


def read_safetensors(path):
    """{name: tensor}. Eight bytes hold the size of a header in JSON; behind it are the numbers."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    data = bytearray(path.read_bytes())
    start, found = 8 + int.from_bytes(data[:8], "little"), {}
    for name, x in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = x["data_offsets"]
            part = data[start + begin : start + end]
            found[name] = torch.frombuffer(part, dtype=dtypes[x["dtype"]]).view(x["shape"])
    return found


def convert(path, out):
    """Write a checkpoint of train.py with the weights of a peer's. Its optimizer is left out."""
    require_file(path)
    if out.exists():
        raise UsageError(f"{out} exists: name another --out")
    try:
        found, about = read_file(path)
    except OSError:
        raise
    except Exception:                                  # torch.load fails in many ways
        raise UsageError(f"{path} is truncated, or not a checkpoint of a peer") from None
    weights = to_ours(found)
    (N, d_E), (_, N_H, d_K) = weights["W_E"].shape, weights["layers.0.W_Q"].shape
    tokenizer = {257: "bytes", 50257: "gpt2"}.get(N)
    if not tokenizer:
        raise UsageError(f"{path} has a vocabulary of {N}: it must be 257 or GPT-2's, 50,257")
    config = Config(N_H, N, sum(name.endswith("W_Q") for name in weights), N_H, d_E, d_K,
                    weights["layers.0.W_V"].shape[2], float(about.get("mipe_threshold", 256)))
    length = about.get("max_train_seq_len", about.get("max_seq_len", 256))
    args = {"model": "multiscreen", "psi": N_H, "layers": config.N_L, "w_th": config.w_th,
            "tiles": N_H, "d_E": config.d_E, "d_K": config.d_K, "d_V": config.d_V,
            "data": [], "tokenizer": tokenizer, "digits": 6, "seq_len": length, "seed": 0}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(out, {
        "model": "multiscreen", "config": asdict(config), "weights": weights,
        "tokenizer": tokenizer, "optimizer": {}, "step": 0, "drawn": 0, "data_state": (),
        "random_state": torch.get_rng_state(), "log": "", "files": [], "args": args,
        "equations": equations("multiscreen"), "source": {}, "classes": [],
        "init_weights": "", "changes": [], "learned": False,
        "versions": {"torch": f"{torch.__version__}"}})
