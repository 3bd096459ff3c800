// Screening (Eq. 12) and its gradients on a CPU, in float32. __init__.py compiles this file
// when it is first needed, for one pair of sizes D_K and D_V, and calls `forward` and `backward`.
//
//     s_ij = q_i . k_j                                   Eq. 8, similarity
//     z_ij = 1 - (1 - s_ij) / r                          Eq. 9, Trim: alpha_ij = max(z_ij, 0)^2
//     m_ij = softmask[i - j]                             Eq. 10, a table from multiscreen.softmask
//     h_i  = sum_j alpha_ij m_ij v_j                     Eqs. 11 and 12
//
// A pair of a query and a key adds nothing if the key lies outside the window or if Trim rejects
// it, and most pairs are of this kind. So `find_alive` compares a query with the keys in its window
// and lists the few that Trim keeps. Only these meet their values, forward and backward. Backward
// lists them again instead of keeping a T x S table.
//
// Gradients, where dh_i is that of h_i, and all sums run over the pairs in the lists:
//
//     g_ij  = dh_i . v_j                                 that of alpha_ij m_ij
//     ds_ij = 2 z_ij m_ij g_ij / r                       dz/ds = 1 / r
//     dq_i  = sum_j ds_ij k_j
//     dk_j  = sum_i ds_ij q_i
//     dv_j  = sum_i alpha_ij m_ij dh_i
//     dr    = sum_ij ds_ij (1 - z_ij)                    dz/dr = (1 - s) / r^2 = (1 - z) / r
//     dm[d] = sum of alpha_ij g_ij over i - j = d        from which PyTorch computes dw
#include <algorithm>
#include <cstdint>
#include <vector>

using Int = int64_t;

// How many similarities are computed at once. The compiler makes a few vectors of them.
constexpr Int LANES = 32;

struct Sizes {
    Int B, H, T, S;     // sequences, tiles, queries, keys
    Int i0;             // position of the first query, counted from the first key
    Int distances;      // columns of the softmask's table: its rows belong to the tiles
    Int threads;
};

// A tensor (B, H, T, D) whose rows of D numbers may lie anywhere. b, h, t: the steps between them.
struct Tensor {
    float *data;
    Int b, h, t;

    float *row(Int n_b, Int n_h, Int n_t) const { return data + n_b * b + n_h * h + n_t * t; }
};

// One tile of one sequence: its keys, and which of them are alive for a query.
struct Tile {
    Int first, end;                     // keys first .. end - 1 are those that some query may see
    Int columns;
    std::vector<float> keys;            // (D_K, columns): keys side by side, then LANES zeros
    Int n_alive = 0;
    std::vector<Int> alive;             // the keys that are alive, counted from `first`
    std::vector<float> z;               // their z_ij

    Tile(const Sizes &size, Int reach, const Tensor &k, Int b, Int h)
        : first(std::max<Int>(size.i0 - reach, 0)),
          end(std::max(std::min(size.i0 + size.T, size.S), first)),
          columns(end - first + LANES), keys(D_K * columns), alive(columns), z(columns) {
        for (Int n = 0; n < end - first; n++) {
            const float *key = k.row(b, h, first + n);
            for (Int d = 0; d < D_K; d++)
                keys[d * columns + n] = key[d];
        }
    }

    // List the keys oldest .. newest that Trim keeps for a query, and those where z is not a number.
    void find_alive(const float *query, float r, Int oldest, Int newest) {
        n_alive = 0;
        const Int stop = newest + 1 - first;
        for (Int start = std::max(oldest, first) - first; start < stop; start += LANES) {
            float s[LANES] = {};
            for (Int d = 0; d < D_K; d++)
                for (Int lane = 0; lane < LANES; lane++)
                    s[lane] += query[d] * keys[d * columns + start + lane];           // Eq. 8
            float z_all[LANES];
            for (Int lane = 0; lane < LANES; lane++)
                z_all[lane] = 1 - (1 - s[lane]) / r;                                  // Eq. 9
            // Write each key to the end of the list, and move the end if it is alive: no branch.
            const Int lanes = std::min(LANES, stop - start);
            for (Int lane = 0; lane < lanes; lane++) {
                alive[n_alive] = start + lane;
                z[n_alive] = z_all[lane];
                n_alive += !(z_all[lane] <= 0);
            }
        }
    }
};

// Call work(b, h) for each tile of each sequence. All that a call writes is its own, so that the
// results have the same bits on any number of threads. The last tiles, which have the widest
// windows in a new model, come first: at the end, no thread has to wait long for another.
template <class Work> void for_each_tile(const Sizes &size, Work work) {
    #pragma omp parallel for schedule(dynamic) num_threads(size.threads)
    for (Int n = 0; n < size.B * size.H; n++)
        work(n % size.B, size.H - 1 - n / size.B);
}

// reach: (H,), the distance of the farthest key that a tile's queries see. softmask: (H, distances).
// Writes h.
extern "C" void forward(Sizes size, const Int *reach, Tensor q, Tensor k, Tensor v,
                        const float *softmask, const float *r, Tensor h) {
    for_each_tile(size, [&](Int b, Int tile) {
        Tile t(size, reach[tile], k, b, tile);
        const float *m = softmask + tile * size.distances;
        for (Int i = 0; i < size.T; i++) {
            const Int at = size.i0 + i;             // the query's position among the keys
            t.find_alive(q.row(b, tile, i), r[tile], at - reach[tile], std::min(at, size.S - 1));
            float sum[D_V] = {};
            for (Int n = 0; n < t.n_alive; n++) {
                const Int distance = at - t.first - t.alive[n];
                const float alpha_d = t.z[n] * t.z[n] * m[distance];                  // Eq. 11
                const float *value = v.row(b, tile, t.first + t.alive[n]);
                for (Int c = 0; c < D_V; c++)
                    sum[c] += alpha_d * value[c];                                     // Eq. 12
            }
            std::copy_n(sum, D_V, h.row(b, tile, i));
        }
    });
}

// Writes dq, dk, dv, dm (B, H, distances) and dr (B, H), each of them zero before.
extern "C" void backward(Sizes size, const Int *reach, Tensor q, Tensor k, Tensor v,
                         const float *softmask, const float *r, Tensor dh, Tensor dq, Tensor dk,
                         Tensor dv, float *dm, float *dr) {
    for_each_tile(size, [&](Int b, Int tile) {
        Tile t(size, reach[tile], k, b, tile);
        const float *m = softmask + tile * size.distances;
        float *dm_tile = dm + (b * size.H + tile) * size.distances;
        std::vector<float> dk_tile((t.end - t.first) * D_K), dv_tile((t.end - t.first) * D_V);
        double sum_r = 0;
        for (Int i = 0; i < size.T; i++) {
            const Int at = size.i0 + i;
            const float *query = q.row(b, tile, i), *dh_row = dh.row(b, tile, i);
            t.find_alive(query, r[tile], at - reach[tile], std::min(at, size.S - 1));
            float dq_row[D_K] = {};
            for (Int n = 0; n < t.n_alive; n++) {
                const Int j = t.alive[n], distance = at - t.first - j;
                const float z = t.z[n];
                const float *key = k.row(b, tile, t.first + j), *value = v.row(b, tile, t.first + j);
                float g = 0;
                #pragma omp simd reduction(+ : g)
                for (Int c = 0; c < D_V; c++)
                    g += dh_row[c] * value[c];
                dm_tile[distance] += z * z * g;
                const float ds = 2 * z * m[distance] * g / r[tile];
                sum_r += ds * (1 - z);
                for (Int c = 0; c < D_V; c++)
                    dv_tile[j * D_V + c] += z * z * m[distance] * dh_row[c];
                for (Int d = 0; d < D_K; d++) {
                    dq_row[d] += ds * key[d];
                    dk_tile[j * D_K + d] += ds * query[d];
                }
            }
            std::copy_n(dq_row, D_K, dq.row(b, tile, i));
        }
        for (Int n = 0; n < t.end - t.first; n++) {
            std::copy_n(&dk_tile[n * D_K], D_K, dk.row(b, tile, t.first + n));
            std::copy_n(&dv_tile[n * D_V], D_V, dv.row(b, tile, t.first + n));
        }
        dr[b * size.H + tile] = sum_r;
    });
}
