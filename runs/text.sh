# Perplexity at 32 times the training length; what the tiles have learned. tiny.sh sets SEEDS, PSI,
# SIZE, TRAIN and MEASURE.
. "$(dirname "$0")/lib.sh"

lanes <<END
python train.py --resume --psi ${PSI:-8} --seed SEED --steps 620 $TRAIN --out $OUT/text_multiscreen-SEED
python train.py --resume --model transformer:${SIZE:-8M} --seed SEED --steps 620 $TRAIN \
    --out $OUT/text_transformer-SEED
END
lanes <<END
python -m experiments.perplexity --length 8192 $MEASURE --ckpt $OUT/text_multiscreen-SEED/ckpt.pt
python -m experiments.perplexity --length 8192 --rope-scale 1 4 16 ntk4 ntk16 $MEASURE \
    --ckpt $OUT/text_transformer-SEED/ckpt.pt
END

run python -m experiments.perplexity --out $OUT/report/long_context.png \
    $OUT/text_multiscreen-?/perplexity.tsv $OUT/text_transformer-?/perplexity.tsv
run python -m experiments.tiles --ckpt $OUT/text_multiscreen-0/ckpt.pt
