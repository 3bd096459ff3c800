"""Is screening the reason? The planned statistic of one experiment, and what the plan says of it.

    python -m study.reason                 once, after all runs have ended

The plan, and what it was written for, is in study/copying.md: softmax and screening in one layout,
with one recipe and one size, seeds 45 to 48. study/copying.py measures, study/runs.py trains. The
rows are rows/reason.tsv, with a pair of swapped strings at one distance in each. A run that has
diverged counts with a gain of 0: enter such rows for it.
"""
from study.tables import markdown, paired, planned, table_of, tests

ENOUGH = 0.70                                          # nats: half of 1.40


def verdict(gain, cost):
    """What the plan says of two differences, dicts of `paired`, in which larger is better."""
    both = gain, cost
    if all(test["p"] < 0.05 and test["mean"] >= ENOUGH for test in both):
        return "the mechanism is a reason"
    if all(test["high"] < ENOUGH for test in both):
        return "it is not the reason"
    return "not decided"


def main():
    pairs = planned()
    print(table_of("reason: gain, mean over pairs"))
    print(markdown(tests(pairs, 2)))
    print("verdict of the plan:", verdict(paired(*pairs["gain"]), paired(*pairs["cost"])))


if __name__ == "__main__":
    main()
