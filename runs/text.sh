# Perplexity at 32 times the training length; what the tiles have learned. tiny.sh sets the
# variables in capitals.
. "$(dirname "$0")/lib.sh"

for seed in ${SEEDS:-0 1 2}; do
    echo python train.py --psi ${PSI:-8} --seed $seed --steps 620 $TRAIN \
        --out $OUT/text_multiscreen-$seed
    echo python train.py --model transformer:${SIZE:-8M} --seed $seed --steps 620 $TRAIN \
        --out $OUT/text_transformer-$seed
done | lanes

for seed in ${SEEDS:-0 1 2}; do
    echo python -m experiments.perplexity --length 8192 $MEASURE \
        --ckpt $OUT/text_multiscreen-$seed/ckpt.pt
    echo python -m experiments.perplexity --length 8192 --rope-scale 1 4 16 ntk4 ntk16 $MEASURE \
        --ckpt $OUT/text_transformer-$seed/ckpt.pt
done | lanes

run python -m experiments.perplexity --out $OUT/report/long_context.png \
    $OUT/text_multiscreen-?/perplexity.tsv $OUT/text_transformer-?/perplexity.tsv
run python -m experiments.tiles --ckpt $OUT/text_multiscreen-0/ckpt.pt
