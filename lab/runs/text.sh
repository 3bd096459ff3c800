# Perplexity at up to 32 times the training length, and what the tiles have learned. Then the
# perplexity with shorter initial windows, and the losses of all models. tiny.sh sets SEEDS, PSI,
# SIZE, TRAIN and MEASURE.
. "$(dirname "$0")/lib.sh"

lanes <<END
python train.py --resume --psi ${PSI:-8} --seed SEED --steps 620 $TRAIN \
    --out $OUT/text_multiscreen-SEED
python train.py --resume --model transformer:${SIZE:-8M} --seed SEED --steps 620 $TRAIN \
    --out $OUT/text_transformer-SEED
END
lanes <<END
python -m lab.perplexity --length 8192 $MEASURE --ckpt $OUT/text_multiscreen-SEED/ckpt.pt
python -m lab.perplexity --length 8192 --rope-scale 1 4 16 ntk4 ntk16 $MEASURE \
    --ckpt $OUT/text_transformer-SEED/ckpt.pt
END

run python -m lab.perplexity --out $OUT/report/long_context.png \
    $OUT/text_multiscreen-?/perplexity.tsv $OUT/text_transformer-?/perplexity.tsv
run python -m lab.tiles --ckpt $OUT/text_multiscreen-0/ckpt.pt

[ "$PSI" ] && exit    # tiny.sh needs no more
lanes <<END
python train.py --resume --psi 8 --w-th 16 --seed SEED --steps 620 \
    --out $OUT/text_multiscreen-w_th16-SEED
END
lanes <<END
python -m lab.perplexity --length 8192 --ckpt $OUT/text_multiscreen-w_th16-SEED/ckpt.pt
END

run python -m lab.perplexity --out $OUT/report/long_context_w_th16.png \
    $OUT/text_multiscreen-w_th16-?/perplexity.tsv
run python -m lab.compare --name text_losses --out $OUT/report \
    "Transformer=$OUT/text_transformer-?" \
    "Multiscreen=$OUT/text_multiscreen-?" \
    "Multiscreen, w_th 16=$OUT/text_multiscreen-w_th16-?"
