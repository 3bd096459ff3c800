"""Is my model one? Try a class, a model or a checkpoint on what trains it and decodes with it.

    python -m lab.check --model mine.Tiles --psi 3 --seq-len 600     any flags of train.py
    python -m lab.check --ckpt out/ckpt.pt                           its own flags and weights
    python -m lab.check --kernel mine                                and a screen of your own, too

Each pass has a model built anew by its name, as train.py builds it, and goes through the functions
that train and decode, at the run's own --seq-len. The answer to a promise is yes, NO with what was
seen, or - with why it could not be tried; the exit code is 1 if there is a NO.

New layers accept few keys and add little, so faults hide in rounding. A new model is therefore
tried with the weights that the steps of the first promise made, magnified by train.py's `magnify`;
a checkpoint is tried as it is. Products are in float32, and nothing is compiled. Layers can magnify
rounding, too, so what is wrong is tried once more in float64, and a NO is wrong in both. What this
cannot see: a leak of one position in a text of more than 64 tokens, unless it is where blocks of
some round number end; parameters that PyTorch does not know.

Below the promises are ticks of no consequence for training: whether relevance is absolute.
"""
import argparse
import copy
import random
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import train
from lab.relevance import weights_of
from multiscreen import Multiscreen

# Errors, relative to the largest loss or logit. Passes of one shape do the same sums for a prefix:
# they differ by 0, or a little if a layer groups its tokens. Other shapes sum in another order.
SAME, CLOSE = 2e-6, 1e-4
ROUNDING = 1e-6                                        # of weights in float64


class Answer(Exception):
    """(answer, why) of a promise: NO and what was seen, or - and why it could not be tried."""


class Trial:
    """The flags of a model, the weights that each new one of it gets, and texts."""

    def __init__(self, args, tokenizer, weights=None):
        self.args, self.tokenizer, self.weights = args, tokenizer, weights
        self.seed, self.in_float64, self.screen = args.seed, False, Multiscreen.screen
        model = self.model()
        self.about_screen = train.choose_screen(model, args.kernel)
        self.screen = model.screen                     # one trial of a twin is enough

    def changed(self, **attributes):
        """The same trial but for these attributes."""
        trial = copy.copy(self)
        vars(trial).update(attributes)
        return trial

    def tokens(self, T, seed, rows=2):
        """Random tokens (rows, T), of at most 256 kinds: those that repeat find each other."""
        g = torch.Generator().manual_seed(seed)
        kinds = torch.randperm(self.tokenizer.n_vocab, generator=g)[:256]
        return kinds[torch.randint(len(kinds), (rows, T), generator=g)].to(self.args.device)

    def text(self, seed=1):
        """Inputs and targets, (2, T) each, two views of one tensor, as in training."""
        tokens = self.tokens(self.args.seq_len + 1, seed)
        return tokens[:, :-1], tokens[:, 1:]

    def set_seeds(self):
        """Seed all random numbers that a model may draw."""
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(self.seed)

    def model(self, mode="eval"):
        """A new model with the weights, all of whose random numbers are drawn from one seed."""
        self.set_seeds()
        model = train.make_model(self.args, self.tokenizer).to(self.args.device)
        if self.weights:
            model.load_state_dict(self.weights)
        if model.screen is Multiscreen.screen:
            model.screen = self.screen
        if self.in_float64:
            model.double()
        return model.train(mode == "train")

    def nats(self, x, y, mode="eval"):
        """The losses of a new model, (B, T), with gradients only in training, as in train.py."""
        model = self.model(mode)
        with torch.set_grad_enabled(mode == "train"):
            return model.loss(x, y, "none").detach()

    def depends_on(self, name):
        """Whether the losses change with a parameter."""
        model, (x, y) = self.model(), self.text()
        model.get_parameter(name).data.add_(1.0)
        return not torch.equal(model.loss(x, y, "none"), self.nats(x, y))

    def repeatable_nats(self, x, y, mode):
        """The losses of a text, if a second pass has the same."""
        nats, again = (self.nats(x, y, mode) for _ in range(2))
        if not torch.allclose(nats, again, rtol=SAME, atol=SAME):
            raise Answer("-", f"in {mode} mode two equal passes differ, though both were seeded, "
                         "so nothing can be compared")
        return nats


def compare(a, b, what, limit=CLOSE, answer="NO"):
    """Give an answer if a and b differ by more than rounding, or are NaN."""
    error = (a - b).abs().max()
    if not error <= limit * b.abs().max().clamp_min(1.0):
        raise Answer(answer, f"{what} differ by {error:.2g}")


def moves(trial):
    """after five steps of AdamW every parameter has moved, and is finite"""
    model, (x, y) = trial.model("train"), trial.text()
    moving = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in moving.items()}
    optimizer = train.make_optimizer(model, trial.args.lr, weight_decay=0.0)   # decay moves all
    for _ in range(5):                                 # a product of zeros takes more than two
        model.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    still = [name for name, p in moving.items() if torch.equal(p, before[name])]
    infinite = [name for name, p in moving.items() if not p.isfinite().all()]
    if infinite:
        raise Answer("NO", f"{len(infinite)} not finite: {infinite[0]}")
    if trial.weights is None:
        train.magnify(model)
        trial.weights = model.state_dict()
    # Each layer must have these three, for the tools, though its equations may not use them.
    still = [name for name in still
             if not name.endswith((".s_w", ".s_r", ".s_O")) or trial.depends_on(name)]
    if still:
        raise Answer("NO", f"{len(still)} not moved: {', '.join(still[:3])}")


def is_its_weights(trial):
    """its weights are all of it: a new one with them is the same, whatever the old one has read"""
    (x, y), passes = trial.text(), {}
    trial.repeatable_nats(x, y, "eval")
    old, new = trial.model("train"), trial.changed(seed=trial.seed + 1).model()
    old.loss(*trial.text(seed=2))
    old.eval().generate(trial.tokens(5, seed=3), 3)
    new.load_state_dict(old.state_dict())
    for model in (old, new):
        trial.set_seeds()
        with torch.no_grad():
            passes[model] = model.loss(x, y, "none"), model(x, model.new_caches())
    for a, b, what in zip(passes[old], passes[new], ("losses", "logits with a new cache")):
        compare(a, b, f"{what} of one that has read other texts and of a new one")


@torch.no_grad()
def is_cross_entropy(trial):
    """loss(x, y, "none") is the cross-entropy of forward(x) with y, in nats; loss(x, y) its mean"""
    z, y = trial.model()(trial.text()[0]).float(), trial.text()[1]
    right = F.cross_entropy(z.mT, y, reduction="none")
    compare(trial.nats(*trial.text()), right, "losses and the cross-entropy of forward")
    compare(trial.model().loss(*trial.text()), right.mean(), "the mean loss and the losses' mean")


def compare_passes(trial, keeps, replaced):
    """Answer NO if a loss changes, in eval or in train mode, when some other tokens are replaced.

    keeps: (passes, 2, T), the tokens that stay, whose losses are compared; replaced: a name of the
    others. The answer is - if training draws random numbers: a layer that draws them for some
    tokens only, such as an expert with dropout, gives each token others if some token changes.
    """
    (x, y), (new_x, new_y) = trial.text(seed=1), trial.text(seed=2)
    another_seed = trial.changed(seed=trial.seed + 1)
    for mode in ("eval", "train"):
        nats, answer, aside = trial.repeatable_nats(x, y, mode), "NO", ""
        if mode == "train" and not nats.equal(another_seed.nats(x, y, mode)):
            answer, aside = "-", " (with random numbers: try it without dropout and noise)"
        for keep in keeps:
            found = trial.nats(x.where(keep, new_x), y.where(keep, new_y), mode)
            token = (found - nats).abs().where(keep, 0.0).amax(0).argmax()
            compare(found[keep], nats[keep], f"in {mode} mode{aside}, {replaced} were replaced: "
                    f"two losses of token {token}", SAME, answer)


def places(T):
    """Where to cut a text of T tokens: everywhere, if it is short, else where blocks may end."""
    powers, hundreds = [2**n for n in range(T.bit_length())], range(100, T, 100)
    chosen = dict.fromkeys([T - 1, T // 3, 2 * T // 3, *powers, *hundreds, *range(T)])
    return [t for t in chosen if 0 < t < T][: max(2**13 // T, 16)]


def is_causal(trial):
    """the losses of a prefix do not depend on what follows"""
    T = trial.args.seq_len
    cuts = torch.tensor(places(T), device=trial.args.device)[:, None, None]
    before = torch.arange(T, device=cuts.device) < cuts
    compare_passes(trial, before.expand(-1, 2, T), "later tokens")
    half, (x, y), (new_x, _) = T // 2 | 1, trial.text(seed=1), trial.text(seed=2)
    nats = trial.nats(x, y)
    compare(trial.nats(x[:, :half], y[:, :half]), nats[:, :half],
            f"the losses of {half} tokens, alone and in a text of {T},")
    mixed = torch.cat([new_x[:, :half], x[:, half:]], 1)
    if torch.allclose(trial.nats(mixed, y)[:, half:], nats[:, half:], rtol=SAME, atol=SAME):
        raise Answer("-", f"no loss after token {half} depends on one before: no fault can show")


def is_alone(trial):
    """a sequence has the same losses alone and in a batch, whatever the others are"""
    x, y = trial.text()
    one_stays = torch.eye(2, dtype=torch.bool, device=x.device)[:, :, None].expand(2, *x.shape)
    compare_passes(trial, one_stays, "other sequences")
    alone = torch.cat([trial.nats(x[row], y[row]) for row in ([0], [1])])
    compare(alone, trial.nats(x, y), "losses alone and in a batch")


def decodes(trial):
    """generate at temperature 0 takes the largest logit of forward, also far out"""
    T = max(trial.args.seq_len, 2)
    # The prompt goes through in three pieces, and the last token that is read ends the third one.
    far = 3 * Multiscreen.tokens_at_once + 1
    for total in sorted({min(45, T), T, max(T, far)}):
        for windows in ("as they are", "narrow and infinite"):
            try:
                decode(trial, total, windows)
            except Exception as e:                     # it may know no more positions
                if total <= T or isinstance(e, (Answer, FloatingPointError)):
                    raise
                raise Answer("-", f"right up to {T} tokens, but {total} fail: {e!r}") from e


@torch.no_grad()
def decode(trial, total, windows):
    """Compare the tokens of generate, and the logits if it calls `logits`, with forward."""
    decoding, whole = trial.model(), trial.model()
    for number, layer in [*enumerate(decoding.layers), *enumerate(whole.layers)]:
        if windows != "as they are" and hasattr(layer, "s_w"):
            layer.s_w.fill_(3.0)                       # 21 tokens
            if number % 2 == 1:
                layer.s_w[::2] = torch.inf
    seen, logits = [], decoding.logits
    def note(*inputs, **options):
        seen.append(logits(*inputs, **options))
        return seen[-1]
    decoding.logits = note
    # Of a short text one sequence is decoded, from its first token on.
    n, rows = (total - 1, 1) if total <= 45 else (16, 2)
    prompt = trial.tokens(total - n, seed=3, rows=rows)
    case = f"{total - n} + {n} tokens, windows {windows}"
    new = decoding.generate(prompt.clone(), n, temperature=0.0)
    z = whole(torch.cat([prompt, new], 1)[:, :-1])[:, -n:].float()
    compare(z.gather(-1, new[..., None])[..., 0], z.amax(-1),
            f"{case}: forward's logits of the tokens that generate chose, and its largest logits,")
    if len(seen) == n and seen[0].shape == z[:, 0].shape:
        compare(torch.stack(seen, 1), z, f"{case}: logits in decoding and in forward")


@torch.no_grad()
def conditions(trial):
    """{condition of absolute relevance: (yes or NO, the number seen)}, in float64 on 24 tokens.

    Version 4 of the paper calls relevance absolute "when its values lie on a fixed bounded scale,
    depend on neither competing keys nor sequence length, require no sequence-length-dependent
    calibration, and can all be zero". The values are here the weights by which a layer sums values;
    a constant that was set for one length by hand passes. The first three conditions must hold in
    all layers, the last two in one. Keys that are never seen, by their position, are not rejected.
    """
    bounded, by_keys, by_length, least, emptiest = [], [], [], [], []          # of each layer
    model = trial.model().double()
    screen = Multiscreen.screen if model.screen is trial.screen else model.screen    # no twin's
    x = model.embed(trial.tokens(24, seed=4, rows=8))
    for layer in model.layers:
        weights, others, mixed = weights_of(layer, x, screen), x.roll(1, 0), x.clone()
        mixed[:, 1::2] = others[:, 1::2]
        altered = weights_of(layer, mixed, screen) - weights
        later = weights_of(layer, torch.cat((others[:, :8], x), 1), screen)[..., 8:, 8:] - weights
        seen = (weights != 0).any(0).expand_as(weights)            # in one of the sequences
        y = layer(x, screen)
        for W in layer.parameters():                   # scores may be as large as they like
            if W.ndim > 1:
                W.mul_(100.0)
        bounded.append(weights_of(layer, x, screen).abs().max())
        by_keys.append(altered[..., ::2, ::2].abs().max())
        by_length.append(later.abs().max())
        least.append(weights[seen].abs().min())
        emptiest.append(weights.abs().amax(-1)[seen.any(-1)].min())
        x = y
    worst = {                                          # and the largest number for a yes
        "bounded: largest weight with all matrices of a layer 100 times as large":
            (torch.stack(bounded).max(), 1 + ROUNDING),
        "no competing keys: change of weights with every other token replaced":
            (torch.stack(by_keys).max(), ROUNDING),
        "no length: change of weights behind eight more tokens":
            (torch.stack(by_length).max(), ROUNDING),
        "exact zeros: least weight of the keys that a query can see":
            (torch.stack(least).min(), 0),
        "all can be 0: least of the queries' largest weights": (torch.stack(emptiest).min(), 0)}
    return {condition: ("yes" if x <= limit else "NO", f"{x:.3g}")
            for condition, (x, limit) in worst.items()}


# ------------------------------------------------------------------------------- the command

def failure(e):
    """What an exception says, and where outside of libraries."""
    frames = traceback.extract_tb(e.__traceback__)
    last = [frame for frame in frames if "site-packages" not in frame.filename][-1]
    return f"fails: {Path(last.filename).name}:{last.lineno}: {e!r}"


PROMISES = (moves, is_its_weights, is_cross_entropy, is_causal, is_alone, decodes)


def answer(promise, trial):
    """Whether a model keeps a promise: (yes,), (NO, why) or (-, why)"""
    try:
        promise(trial)
        return ("yes",)
    except Answer as e:
        return e.args
    except Exception as e:                             # whatever it is, a run meets it, too
        return "NO", failure(e)


def answers(trial):
    """({promise: (yes,), (NO, why) or (-, why)}, {condition: the same, with what was seen})"""
    found = {}
    for promise in PROMISES:
        found[promise.__doc__] = answer(promise, trial)
        if found[promise.__doc__][0] == "NO":
            if answer(promise, trial.changed(in_float64=True)) == ("yes",):
                found[promise.__doc__] = ("yes",)
    try:
        return found, conditions(trial)
    except Exception as e:                             # a layer of yours may have other methods
        return found, {"not tried, as the weights of a layer are not seen": ("-", failure(e))}


def main():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ckpt", help="a checkpoint of train.py; all other flags are train.py's")
    own, flags = p.parse_known_args()
    ckpt = train.read_checkpoint(own.ckpt) if own.ckpt else {}
    args = train.get_args(flags, ckpt)                 # as if the run went on
    trial = Trial(args, train.get_tokenizer(args.tokenizer), ckpt.get("weights"))
    promises, ticks = answers(trial)
    about = f"{own.ckpt or args.model}, {args.seq_len} tokens, {trial.about_screen}"
    for title, group in ((about, promises), ("absolute relevance", ticks)):
        print(title)
        for promise, (answer, *why) in group.items():
            print(f"{answer:>5}  {promise}", *why, sep="\n       ")
    sys.exit(any(answer == "NO" for answer, *_ in promises.values()))


if __name__ == "__main__":
    main()
