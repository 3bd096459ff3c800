"""Twelve ways to attend, screening among them: the Transformer's layer with one thing changed.

    python train.py --model study.attention.Entmax --layers 4 --tiles 4 --d-E 72

Query i meets the keys j <= i, n of them, with scores s_ij = q_i . k_j / sqrt(K) and distances
d = j - i <= 0. It gets h_i = sum_j p_ij v_j. They differ in p, and in what tells positions:

name           p_ij                                            positions     further weights
Softmax        softmax_j(s_ij)                                 RoPE          -
NoPE           softmax_j(s_ij)                                 none          -
Local          softmax_j(s_ij), -64 < d in odd layers          RoPE, none    -
ALiBi          softmax_j(s_ij + m d)                           slopes m      -
SSMax          softmax_j(c log(n) s_ij)                        RoPE          c of a head
OffByOne       exp(s_ij) / (1 + sum_l exp(s_il))               RoPE          -
Sigmoid        sigmoid(s_ij + m d - log n)                     slopes m      -
Entmax         max(s_ij / 2 - tau_i, 0)^2, sum_j p_ij = 1      RoPE          -
StickBreaking  b_ij prod_{j<l<i} (1 - b_il), b = sigmoid(s)    p itself      -
Forgetting     softmax_j(s_ij + sum_{j<l<=i} log f_l)          gates f       E + 1 of a head
Selective      softmax_j(s_ij - sum_{j<l<i} max(s'_lj, 0))     RoPE          -
Screening      Trim(q_i . k_j) Softmask(d), q, k of length 1   MiPE, window  s_w, s_r of a head

In screening v_j has length 1, too, and h_i goes through TanhNorm. In sigmoid's source n is one for
all queries, the length of a sequence in training.

Sources: RoPE, Su 2021. NoPE: Kazemnejad 2023. Local: Beltagy 2020 (windows), Yang 2025 (with NoPE).
ALiBi: Press 2022. SSMax: Nakanishi 2025. OffByOne: Miller 2023. Sigmoid: Ramapuram 2025. Entmax:
Peters 2019. StickBreaking: Tan 2025. Forgetting: Lin 2025. Selective: Leviathan 2025. Screening:
the paper. These are definitions, T x S in memory; where softmax does, PyTorch's attention serves.
Scores, gates and p are float32.

Each name is what --model takes, a function that makes a Transformer; `Entmax.block` is its layer.
"""
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from lab.transformer import Block, Transformer, distances
from multiscreen import acceptance, double, mipe, mipe_angle, tanh_norm, unit, window


def transformer_of(block, **constants):
    """f(config, dtype) -> a Transformer of such layers, with a Transformer's defaults of flags.

    constants: attributes in which its layers differ from `block`.
    """
    if constants:
        block = type(block.__name__, (block,), constants)
    make = partial(Transformer, block=block)
    make.block, make.recipe = block, Transformer.recipe
    return make


# ---------------------------------------------------------- softmax, with other positions or scores

Softmax = Transformer
NoPE = transformer_of(Block, rope_scale=None)          # only the causal mask tells positions apart


@transformer_of
class QKNorm(Block):
    """RMSNorm with weights on queries and keys, before RoPE."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.norm_q = nn.RMSNorm(config.d_E // config.N_H, eps=1e-5)
        self.norm_k = nn.RMSNorm(config.d_E // config.N_H, eps=1e-5)

    def encode(self, q, k, i):
        return super().encode(self.norm_q(q), self.norm_k(k), i)


@transformer_of
class Local(Block):
    """RoPE in a sliding window of 64 tokens in odd layers, no positions in even ones."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        if number % 2:
            self.nearby = 64
        else:
            self.rope_scale = None
            self.flattest = math.inf                   # in study/local.py: no slopes, m = 0


@transformer_of
class SSMax(Block):
    """Scalable-Softmax: softmax over n keys fades as n grows; of scores times c log n it does not.

    A head learns c, which begins at 1 / log 256: for 256 keys it is softmax.
    """

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.s = nn.Parameter(torch.full((config.N_H,), 1 / math.log(256)))

    def encode(self, q, k, i):
        q, k = super().encode(q, k, i)
        n = (i + 1).to(q.dtype).clamp(max=self.nearby)
        return q * self.s[:, None, None] * n.log()[:, None], k


# ------------------------------------------------------------------- p as a function of the scores

class Scored(Block):
    """A layer whose p is written out. A mechanism overrides `weights`, or `scores`."""

    def mix(self, q, k, v, i0, screen):
        d = distances(q, k, i0)
        s = self.scores(q, k, i0).masked_fill(~self.seen(d), -math.inf)
        return self.weights(s, d).to(v.dtype) @ v

    def scores(self, q, k, i0):
        """s_ij = q_i . k_j / sqrt(K): (B, H, T, S). i0: the position of the first query."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype) @ k.to(dtype).transpose(-2, -1) / math.sqrt(q.shape[-1])

    def weights(self, s, d):
        """p. s: (B, H, T, S), scores, -inf for keys that are not seen; d = j - i: (T, S)."""
        return s.softmax(-1)


@transformer_of
class ALiBi(Scored):
    """Scores fall with the distance, by m = 2^(-8/H) in the first head, 2^-8 in the last."""
    rope_scale = None
    flattest = 8.0                                     # -log2 m of the last head

    def scores(self, q, k, i0):
        s = super().scores(q, k, i0)
        head = torch.arange(1, self.N_H + 1, device=s.device, dtype=s.dtype)
        m = 2 ** (-self.flattest / self.N_H * head)
        return s + m[:, None, None] * distances(q, k, i0)


@transformer_of
class OffByOne(Scored):
    """Softmax with one more key, of score 0 and without a value: a query may attend to nothing."""

    def weights(self, s, d):
        return F.pad(s, (1, 0)).softmax(-1)[..., 1:]


@transformer_of
class Sigmoid(ALiBi.block):
    """Each key on its own, whatever the others are. At first a key weighs about 1/n."""

    def weights(self, s, d):
        n = self.seen(d).sum(-1, keepdim=True).to(s)
        return (s - n.log()).sigmoid()


@transformer_of
class Entmax(Scored):
    """1.5-entmax: softmax with exact zeros. Keys compete; 2 below the best score p is 0.

    Newton's method finds tau. It rises from -1, and the last step carries the gradient. Each time
    the keys are four times as many it may need another step: 12 do for 4,096, 20 for 2^26.
    """

    def weights(self, s, d):
        z = ((s - s.amax(-1, keepdim=True)) / 2).clamp(min=-1)
        tau, steps = -1.0, 12 if s.shape[-1] <= 4096 else 20
        for n in range(steps):
            y = ((z if n == steps - 1 else z.detach()) - tau).relu()
            tau = tau + (y.square().sum(-1, keepdim=True) - 1) / (2 * y.sum(-1, keepdim=True))
        return (z - tau).relu().square()


@transformer_of
class StickBreaking(Scored):
    """The key before i takes the share b of a stick, the next one b of the rest, and so on."""
    rope_scale = None

    def weights(self, s, d):
        s = s.masked_fill(d == 0, -math.inf)
        log_rest = F.logsigmoid(-s)                    # log(1 - b); 0 for a later key
        log_left = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
        return s.sigmoid() * log_left.exp()


# ------------------------------------------------------------------ p that needs more of old tokens

@transformer_of
class Forgetting(Scored):
    """Forgetting attention: each token fades all keys before it by its f = sigmoid(x w_f + b_f).

    A key brings log f of its token along, as one more dimension.
    """
    rope_scale = None
    b_0 = 0.0                                          # b_f at first

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.W_f = nn.Parameter(torch.empty(config.d_E, config.N_H))
        self.b_f = nn.Parameter(torch.full((config.N_H,), self.b_0))

    def project(self, x, i):
        q, k, v = super().project(x, i)
        log_f = F.logsigmoid(x @ self.W_f + self.b_f)  # float32: an error adds up over tokens
        return q, torch.cat((k, log_f.transpose(1, 2)[..., None]), -1), v

    def scores(self, q, k, i0):
        k, log_f = k.split((q.shape[-1], 1), -1)
        c = double(log_f).cumsum(2)                    # a small difference of large sums
        s = super().scores(q, k, i0)
        return s + (c[:, :, i0:] - c.transpose(-2, -1)).to(s)


@transformer_of
class Selective(Scored):
    """Selective attention: what tokens before i found of key j in the first head lowers j for i.

    s' is the first head's score; a token selects neither itself nor the first token. A key brings
    the query of its token along.
    """

    def project(self, x, i):
        q, k, v = super().project(x, i)
        return q, torch.cat((k, q), -1), v

    def scores(self, q, k, i0):
        k, q_all = k.chunk(2, -1)
        found = super().scores(q_all[:, :1], k[:, :1], 0).relu().tril(-1)
        found = F.pad(found[..., 1:], (1, 0))
        return super().scores(q, k, i0) - (found.cumsum(2) - found)[:, :, i0:]


# ---------------------------------------------------------------------------------------- screening

@transformer_of
class Screening(Block):
    """The paper's screening unit (Eqs. 4 to 14) in place of attention, without gate and s_O.

    r begins at r_0, where about a third of random pairs pass Trim: at 1/2, the paper's, few do, and
    heads stay closed. s_w is stored divided by `speed`: windows learn so many times as fast as at
    the rate of all weights, which is lower than Multiscreen's.
    """
    rope_scale = None
    w_th, r_0, speed = 256.0, 0.88, 8.0

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.s_w = nn.Parameter(torch.linspace(0, math.log(self.w_th), config.N_H) / self.speed)
        self.s_r = nn.Parameter(torch.full((config.N_H,), math.log(self.r_0 / (1 - self.r_0))))

    @property
    def w(self):
        return window(self.speed * self.s_w)

    @property
    def r(self):
        return acceptance(self.s_r)

    def project(self, x, i):
        angle = mipe_angle(i, self.w, self.w_th)
        q, k = (mipe(unit(self.heads(x, W)), angle) for W in (self.W_Q, self.W_K))
        return q, k, unit(self.heads(x, self.W_V)).to(self.dtype or x.dtype)

    def mix(self, q, k, v, i0, screen):
        return tanh_norm(screen(q, k, v, self.w, self.r, i0).to(q.dtype))


# --------------------------------------- tried, too, in tuning: study/runs.py says which won

SSMaxNoPE = transformer_of(SSMax.block, rope_scale=None)
# Slopes m from 2^(-4/H) to 2^-4: scores fall faster.
SteepALiBi = transformer_of(ALiBi.block, flattest=4.0)
# Gates begin at sigmoid(3) = 0.95: a key fades to a half in 14 tokens, not in one.
LateForgetting = transformer_of(Forgetting.block, b_0=3.0)
# r begins at 0.97: about every second pair passes Trim.
WideScreening = transformer_of(Screening.block, r_0=0.97)


@transformer_of
class FixedSigmoid(Sigmoid.block):
    """The bias is that of 256 keys, however many there are."""

    def weights(self, s, d):
        return (s - math.log(256)).sigmoid()
