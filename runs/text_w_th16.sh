# The same with shorter windows, and the losses of all. After text.sh.
. "$(dirname "$0")/lib.sh"

for seed in 0 1 2; do
    echo python train.py --psi 8 --w-th 16 --seed $seed --steps 620 \
        --out $OUT/text_multiscreen-w_th16-$seed
done | lanes

for seed in 0 1 2; do
    echo python -m experiments.perplexity --length 8192 \
        --ckpt $OUT/text_multiscreen-w_th16-$seed/ckpt.pt
done | lanes

run python -m experiments.perplexity --out $OUT/report/long_context_w_th16.png \
    $OUT/text_multiscreen-w_th16-?/perplexity.tsv
run python -m experiments.compare --name text_losses --out $OUT/report \
    "Transformer=$OUT/text_transformer-?" \
    "Multiscreen=$OUT/text_multiscreen-?" \
    "Multiscreen, w_th 16=$OUT/text_multiscreen-w_th16-?"
