# A check that everything runs, in two minutes on one core. Nothing is learned: its numbers say
# nothing about the paper. runs/lib.sh says how to use it.
FIGURES="models abcdigits passkey perplexity losses maps latency"
. "$(dirname "$0")/lib.sh"

TEXT="--seq-len 64 --batch-size 4 --warmup 2 --steps 10 --log-every 1 --kernel definition"

models() {
    train --psi 2 --data abcdigits --digits 2 --batch-size 2 --steps 10 --out $OUT/needles
    train --psi 2 $TEXT --out $OUT/multiscreen
    train --psi 2 --lr 1e18 $TEXT --out $OUT/diverged
    train --psi 2 --model multiscreen:no-gate $TEXT --out $OUT/no-gate
    train --model transformer:2,2,16 $TEXT --out $OUT/transformer
}

abcdigits() {
    run python abcdigits.py --lengths 256 --trials 1 --swe --ckpt $OUT/needles/ckpt.pt
    run $E.retrieval $OUT/needles/abcdigits.tsv --out $REPORT/abcdigits.png
}

passkey() {
    run $E.passkey --lengths 512 --trials 1 --ckpt $OUT/needles/ckpt.pt
}

perplexity() {
    run $E.perplexity --length 256 --documents 1 --ckpt $OUT/multiscreen/ckpt.pt
    run $E.perplexity $OUT/multiscreen/perplexity.tsv --out $REPORT/long_context.png
}

losses() {
    run $E.scaling $OUT/{multiscreen,transformer} --out $REPORT
    run $E.compare $OUT/{multiscreen,no-gate,diverged,transformer} --name compare --out $REPORT
    run $E.compare $REPORT/compare.tsv --by lr --out $REPORT
}

maps() {
    run $E.scaling
    run $E.sample --tokens 4 --ckpt $OUT/multiscreen/ckpt.pt
    run $E.tiles --tokens 50 --ckpt $OUT/multiscreen/ckpt.pt
}

latency() {
    run $E.latency --psi 2 --transformer 1,2,8 --lengths 256 512 --repeats 1 \
        --out $REPORT/latency.png
    run $E.latency $REPORT/latency.tsv
}

main "$@"
