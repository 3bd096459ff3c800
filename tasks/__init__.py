"""What models are trained on besides text: endless documents of a task, by the name of --data."""
from tasks.abcdigits import ABCDigitsStream
from tasks.passkey import PasskeyStream


def get_stream(args, tokenizer):
    """(training, validation) documents of the flags --data abcdigits or --data passkey."""
    if args.data == ["abcdigits"]:
        return tuple(ABCDigitsStream(tokenizer, args.seq_len, args.digits, args.seed, part)
                     for part in (0, 1))
    return tuple(PasskeyStream(tokenizer, args.seq_len, args.seed, part) for part in (0, 1))
