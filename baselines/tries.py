"""What was tried once more for a mechanism of attention.py, on the seed of the tuning.

docs/mechanisms.md says which of the two won.
"""
import math

from baselines.attention import ALiBi, Forgetting, Screening, Sigmoid


class FlatALiBi(ALiBi):
    """Slopes m from 2^-1 to 2^-4: twice as many keys are near."""
    steepest, flattest = 1.0, 4.0


class FixedSigmoid(Sigmoid):
    """The bias is that of 256 keys, however many there are."""

    def bias(self, n):
        return -math.log(256)


class LateForgetting(Forgetting):
    """Gates begin at sigmoid(3) = 0.95: a key fades to a half in 14 tokens, not in one."""
    b_0 = 3.0


class WideScreening(Screening):
    """r begins at 0.97: about every second pair passes Trim."""
    r_0 = 0.97


class SlowScreening(Screening):
    """Windows learn at the rate of all other weights."""
    speed = 1.0


BLOCKS = {"alibi-flat": FlatALiBi, "sigmoid-fixed": FixedSigmoid, "forgetting-late": LateForgetting,
          "screening-wide": WideScreening, "screening-slow": SlowScreening}
