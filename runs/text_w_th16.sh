# The same with shorter windows, and the losses of all. After text.sh.
. "$(dirname "$0")/lib.sh"

lanes <<END
python train.py --resume --psi 8 --w-th 16 --seed SEED --steps 620 --out $OUT/text_multiscreen-w_th16-SEED
END
lanes <<END
python -m experiments.perplexity --length 8192 --ckpt $OUT/text_multiscreen-w_th16-SEED/ckpt.pt
END

run python -m experiments.perplexity --out $OUT/report/long_context_w_th16.png \
    $OUT/text_multiscreen-w_th16-?/perplexity.tsv
run python -m experiments.compare --name text_losses --out $OUT/report \
    "Transformer=$OUT/text_transformer-?" \
    "Multiscreen=$OUT/text_multiscreen-?" \
    "Multiscreen, w_th 16=$OUT/text_multiscreen-w_th16-?"
