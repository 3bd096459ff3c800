"use strict";
// The model: the equations of multiscreen.py once more, for one token at a time. After an edit
// there, edit them here. The keys and values of earlier tokens are cached: a letter at the end
// costs one token, a letter in the middle all tokens from there on.

// -------------------------------------------------------------- the formulas that a reader edits

// Names that a formula may use without "Math." before them.
const {abs, cos, exp, log, max, min, PI, sin, sqrt, tanh} = Math;

const ORIGINAL = {
  trim: "max(1 - (1 - s) / r, 0) ** 2",                                    // Eq. 9
  softmask: "-w < d && d <= 0 ? (cos(PI * d / w) + 1) / 2 : 0",            // Eq. 10
};

// A formula is tried on these arguments before the model uses it.
const TRIED = {
  trim: {names: ["s", "r"], values: [range(-1, 1, 0.01), [0.001, 0.01, 0.1, 0.5, 1]]},
  softmask: {names: ["d", "w"], values: [range(-1000, 10, 1), [1, 1.5, 17, 250, Infinity]]},
};

function range(first, last, step) {
  return Array.from({length: Math.round((last - first) / step) + 1}, (_, n) => first + n * step);
}

// Make a function of the formula `name`, "trim" or "softmask", from its text. Throws an Error that
// says what is wrong. These two formulas, typed by the reader, are the only text of the page that
// ever becomes code.
function compile(name, text) {
  const {names, values: [first, second]} = TRIED[name];
  const formula = new Function(...names, `"use strict"; return +(${text}\n);`);
  for (const b of second) {
    for (const a of first) {
      const y = formula(a, b);
      if (Number.isFinite(y)) continue;
      throw new RangeError(`it gives ${y} for ${names[0]} = ${+a.toFixed(2)} and ${names[1]} = ${b}`);
    }
  }
  return Object.assign(formula, {text});
}

// What the model uses now. softmax: weigh all keys of a row by softmax(s / tau) instead.
let rules = {trim: compile("trim", ORIGINAL.trim), softmask: compile("softmask", ORIGINAL.softmask),
             softmax: false, tau: 0.1};

// ---------------------------------------------------------------------------- one screening unit

function unit(x) {                                     // Eq. 5
  const length = Math.max(Math.sqrt(dot(x, x)), 1e-6);
  return x.map((value) => value / length);
}

function mipe(x, i, w, w_th) {                         // Eqs. 6 and 7: a turn of two dimensions
  const near = Math.min(w, w_th), gamma = 0.5 * (Math.cos(Math.PI * near / w_th) + 1);
  const angle = Math.PI * i * gamma / near, cos = Math.cos(angle), sin = Math.sin(angle);
  const turned = x.slice();
  turned[0] = x[0] * cos - x[1] * sin;
  turned[1] = x[0] * sin + x[1] * cos;
  return turned;
}

function relevances(s, i, w, r) {                      // Eq. 11, of query i: s are its similarities
  if (rules.softmax) return softmax(s.map((s) => s / rules.tau));
  return s.map((s, j) => rules.trim(s, r) * rules.softmask(j - i, w));
}

function screen(alphas, v) {                           // Eq. 12
  const h = new Float64Array(v[0].length);
  for (let j = 0; j < alphas.length; j++) {
    if (alphas[j] === 0) continue;
    for (let d = 0; d < h.length; d++) h[d] += alphas[j] * v[j][d];
  }
  return h;
}

function tanhNorm(h) {                                 // Eq. 13
  const length = Math.sqrt(dot(h, h));
  return length < 1e-6 ? h : h.map((value) => value * Math.tanh(length) / length);
}

function gate(g) {                                     // Eq. 17: tanh(SiLU(g))
  return Math.tanh(g / (1 + Math.exp(-g)));
}

// --------------------------------------------------------------------------------- the products

function dot(x, y) {
  let sum = 0;
  for (let n = 0; n < x.length; n++) sum += x[n] * y[n];
  return sum;
}

function product(x, W) {                               // x W, of a matrix W that is stored by rows
  const y = new Float64Array(W.length / x.length);
  let at = 0;
  for (const value of x) {
    for (let c = 0; c < y.length; c++) y[c] += value * W[at++];
  }
  return y;
}

function softmax(scores) {
  const most = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const e = scores.map((x) => Math.exp(x - most));
  const sum = e.reduce((a, b) => a + b, 0);
  return e.map((x) => x / sum);
}

function float16(bits) {                               // a number of 16 bits
  const exponent = bits >> 10 & 31, fraction = bits & 1023;
  const size = exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction;
  return bits >> 15 ? -size : size;
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;
}

// ------------------------------------------------------------------------------------ the model

// `tokens` are those read so far, `x[i]` is what the last layer makes of token i. Each of `tiles`
// has w, r, and for each token i: its key k[i], its value v[i], its similarities s[i] to the keys
// up to i, and their relevances alpha[i].
class Model {
  constructor(data) {
    Object.assign(this, data);                         // N_L, N_H, d_E, d_K, d_V, w_th, s_E, s_F
    const numbers = Float64Array.from(new Uint16Array(bytes(data.matrices)), float16);
    let at = 0;
    const matrix = (size) => numbers.subarray(at, at += size);
    const {N_H, d_E, d_K, d_V} = data;
    this.W_E = Array.from({length: data.vocab_size}, () => unit(matrix(d_E)));
    this.layers = Array.from({length: data.N_L}, () => ({
      W_Q: matrix(d_E * N_H * d_K), W_K: matrix(d_E * N_H * d_K), W_V: matrix(d_E * N_H * d_V),
      W_G: matrix(d_E * N_H * d_V), W_O: matrix(N_H * d_V * d_E)}));
    this.tiles = data.w.map((w, n) => ({w: w ?? Infinity, r: data.r[n], s_O: data.s_O[n],
                                        k: [], v: [], s: [], alpha: []}));
    this.tokens = [];
    this.x = [];
  }

  // Read a text. What it has in common with the last one, from the beginning on, stays as it is.
  // Returns how many tokens went through the layers.
  read(tokens) {
    const same = this.tokens.findIndex((token, i) => token !== tokens[i]);
    if (same >= 0) this.forget(same);
    const old = this.tokens.length;
    for (let i = old; i < tokens.length; i++) this.append(tokens[i]);
    return tokens.length - old;
  }

  forget(n) {                                          // the tokens from n on
    this.tokens.length = this.x.length = n;
    for (const tile of this.tiles) {
      tile.k.length = tile.v.length = tile.s.length = tile.alpha.length = n;
    }
  }

  append(token) {
    let x = Float64Array.from(this.W_E[token], (value) => Math.exp(this.s_E) * value);     // Eq. 1
    for (let n = 0; n < this.N_L; n++) x = this.layer(n, x, this.tokens.length);
    this.tokens.push(token);
    this.x.push(x);
  }

  layer(n, x, i) {                                     // Eqs. 2 and 14 to 18
    const {N_H, d_K, d_V} = this, {W_Q, W_K, W_V, W_G, W_O} = this.layers[n];
    const q = product(x, W_Q), k = product(x, W_K), v = product(x, W_V), g = product(x, W_G);
    const y = new Float64Array(N_H * d_V);
    this.tiles.slice(n * N_H, (n + 1) * N_H).forEach((tile, m) => {
      const encode = (x) => mipe(unit(x.subarray(m * d_K, (m + 1) * d_K)), i, tile.w, this.w_th);
      const q_tilde = encode(q);
      tile.k.push(encode(k));
      tile.v.push(unit(v.subarray(m * d_V, (m + 1) * d_V)));
      const s = new Float32Array(i + 1);
      for (let j = 0; j <= i; j++) s[j] = dot(q_tilde, tile.k[j]);                         // Eq. 8
      tile.s.push(s);
      tile.alpha.push(relevances(s, i, tile.w, tile.r));
      tanhNorm(screen(tile.alpha[i], tile.v)).forEach((u, d) => {
        y[m * d_V + d] = u * gate(g[m * d_V + d]) * Math.exp(tile.s_O);
      });
    });
    return product(y, W_O).map((change, e) => x[e] + change);
  }

  logits(i) {                                          // Eq. 3, of what follows token i
    return this.W_E.map((e) => Math.exp(this.s_F) * dot(this.x[i], e));
  }

  // The token that most likely follows token i, and its probability.
  next(i) {
    const p = softmax(this.logits(i)), token = p.indexOf(Math.max(...p));
    return {token, p: p[token]};
  }
}
