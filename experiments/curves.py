"""What the table of training curves says about one run: smoothed losses, norms, spikes."""
import numpy as np


def moving_average(x, window):
    """Means of `window` neighbours, or of all if there are fewer. (n,) -> (n - window + 1,)"""
    return np.lib.stride_tricks.sliding_window_view(x, min(window, len(x))).mean(-1)


def count_spikes(x, window):
    """How many values are spikes: more than 5 standard deviations above the mean of those before.

    x: (n,). Mean and deviation are those of the `window` values before a value.
    """
    if len(x) <= window:
        return 0
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    return int((x[window:] > before.mean(-1) + 5 * before.std(-1)).sum())


def get_columns(rows):
    """(step, loss, grad_norm), arrays (n,), of the rows of a log.tsv that have all three."""
    names = ("step", "loss", "grad_norm")
    rows = [row for row in rows if set(names) <= row.keys()]
    return tuple(np.array([row[name] for row in rows]) for name in names)


def summarize_run(step, loss, norm, window):
    """[steps, loss_first, loss_last, loss_spikes, grad_median, grad_p90, grad_max, grad_spikes]

    Losses are smoothed, in nats per token. Gradient norms: of the second half of the steps.
    """
    smooth = moving_average(loss, window)
    late = norm[step > step[-1] / 2]
    median, p90 = np.quantile(late, [0.5, 0.9])
    return [int(step[-1]), float(smooth[0]), float(smooth[-1]), count_spikes(loss, window),
            float(median), float(p90), float(late.max()), count_spikes(norm, window)]
