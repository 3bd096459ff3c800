"""What models are trained on besides text: endless documents of a task, by the name of --data."""
from tasks.abcdigits import ABCDigitsStream
from tasks.passkey import PasskeyStream


def get_stream(args, tokenizer):
    """(training, validation) documents of the flags --data abcdigits or --data passkey."""
    T, seed = args.seq_len, args.seed
    if args.data == ["abcdigits"]:
        return tuple(ABCDigitsStream(tokenizer, T, args.digits, seed, part) for part in (0, 1))
    return tuple(PasskeyStream(tokenizer, T, seed, part) for part in (0, 1))
