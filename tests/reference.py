"""The Transformers in float64: the tests' reference of what lab/ and study/ have.

Independent of them on purpose, and slow on purpose: one sequence, one head and one query at a time,
with the formulas as printed. What is screened is the paper in the proof.

p: parameters by name, float64; c: the model's Config; tokens: (T,) integers.
"""
import math

import torch

from test_multiscreen import paper_screening_unit, paper_turned

THETA = 10_000                                         # RoPE's base


def rope(x, scale="1"):
    """RoPE, for each row. scale divides the positions; "ntk4" slows the slowest pair by 4."""
    i = torch.arange(len(x), dtype=x.dtype)
    K = x.shape[1]
    speed = [THETA ** (-2 * n / K) for n in range(K // 2)]
    if scale.startswith("ntk"):
        share = [n / (K // 2 - 1) for n in range(K // 2)]      # 0: the fastest, 1: the slowest
        speed = [v * float(scale[3:]) ** -x for v, x in zip(speed, share)]
        scale = "1"
    return paper_turned(x, torch.outer(i / float(scale), torch.tensor(speed, dtype=x.dtype)))


# The mechanisms of study/attention.py written out here. One that you add needs none.
MECHANISMS = ("Softmax", "QKNorm", "NoPE", "Local", "ALiBi", "SSMaxNoPE", "SSMax", "OffByOne",
              "Sigmoid", "Entmax", "StickBreaking", "Forgetting", "Selective", "Screening")
WITH_ROPE = ("Softmax", "QKNorm", "SSMax", "OffByOne", "Entmax", "Selective")


def entmax(s):
    """1.5-entmax by sorting (Peters 2019): the first keys of the order whose tau fits."""
    z = s.sort(descending=True).values / 2
    for n in range(len(z), 0, -1):
        mean, square = z[:n].mean(), z[:n].square().mean()
        tau = mean - (1 / n - (square - mean**2)).clamp(min=0).sqrt()
        if tau <= z[n - 1]:
            return (s / 2 - tau).clamp(min=0) ** 2


def attention_weights(variant, s, i, t, H, log_f, selected):
    """p of query i for the keys 0 .. i with scores s, in head t of H.

    log_f: (T,), log gates; selected: (i + 1,), what earlier tokens found of each key.
    """
    m, n = 2 ** (-8 * (t + 1) / H), i + 1
    d = torch.arange(n, dtype=s.dtype) - i
    if variant == "ALiBi":
        return (s + m * d).softmax(0)
    if variant == "Sigmoid":
        return 1 / (1 + n * (-s - m * d).exp())
    if variant == "OffByOne":
        return s.exp() / (1 + s.exp().sum())
    if variant == "Entmax":
        return entmax(s)
    if variant == "StickBreaking":
        p, rest = [s.new_zeros(())], 1.0
        for j in range(i - 1, -1, -1):
            b = 1 / (1 + (-s[j]).exp())
            p.insert(0, b * rest)
            rest = rest * (1 - b)
        return torch.stack(p)
    if variant == "Forgetting":
        s = s + torch.stack([log_f[j + 1 : n].sum() for j in range(n)])
    if variant == "Selective":
        s = s - selected
    return s.softmax(0)


def reference_transformer(p, c, tokens, variant="Softmax"):
    """The logits (T, N) of the baseline, a LLaMA, or of one that attends otherwise."""
    def norm(y, weight=1.0):
        return y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight

    K = c.d_E // c.N_H
    x = p["W_E"][tokens]
    for n in range(c.N_L):
        layer = f"layers.{n}."
        W = {key.removeprefix(layer): value for key, value in p.items() if key.startswith(layer)}
        y = norm(x, W["norm_1.weight"])
        heads = []
        for t in range(c.N_H):
            columns = slice(t * K, (t + 1) * K)
            q, k, v = (y @ W[name][:, columns] for name in ("W_Q", "W_K", "W_V"))
            if variant == "QKNorm":
                q, k = norm(q, W["norm_q.weight"]), norm(k, W["norm_k.weight"])
            if variant in WITH_ROPE or variant == "Local" and n in (0, 2, 4):
                q, k = rope(q), rope(k)
            if variant == "Screening":
                # s_w is stored as an eighth.
                w, r = (8 * W["s_w"][t]).exp() + 1, 1 / (1 + (-W["s_r"][t]).exp())
                heads.append(paper_screening_unit(q, k, v, w, r, 256.0))
                continue
            log_f = selected = None
            if variant == "Forgetting":
                log_f = -(1 + (-(y @ W["W_f"] + W["b_f"])[:, t]).exp()).log()
            if variant == "Selective" and t == 0:
                first_scores = (q @ k.T / math.sqrt(K)).clamp(min=0)
            h = []
            for i in range(len(x)):
                first = max(i - 63, 0) if variant == "Local" and n in (0, 2, 4) else 0
                s = k[first : i + 1] @ q[i] / math.sqrt(K)
                if variant.startswith("SSMax"):
                    s = s * W["s"][t] * math.log(i + 1)
                if variant == "Selective":
                    selected = torch.stack([first_scores[j + 1 : i, j].sum() * (j > 0)
                                            for j in range(i + 1)])
                weights = attention_weights(variant, s, i, t, c.N_H, log_f, selected)
                h.append(weights @ v[first : i + 1])
            heads.append(torch.stack(h))
        x = x + torch.cat(heads, 1) @ W["W_O"]
        y = norm(x, W["norm_2.weight"])
        gate = y @ W["W_gate"]
        x = x + (gate / (1 + (-gate).exp()) * (y @ W["W_up"])) @ W["W_down"]
    return norm(x) @ p["W_E"].T
