# Train on passkey until it is learned, then find keys at up to 16 times the training length.
. "$(dirname "$0")/lib.sh"
task="python train.py --resume --data passkey --seq-len 512 --batch-size 4 --steps 6000 --seed SEED"
measure="python -m lab.passkey --lengths 512 1024 2048 4096 8192"

# The recipe was tuned on seeds 0 to 2.
SEEDS="0 1 2 3 4 5" lanes <<END
$task --w-th 8192 --layers 4 --lr 0.015625 --out $OUT/keys_multiscreen-SEED
END
SEEDS="0 1 2 3 4 5" lanes <<END
$measure --ckpt $OUT/keys_multiscreen-SEED/ckpt.pt
$measure --swe --ckpt $OUT/keys_multiscreen-SEED/ckpt.pt
END
lanes <<END
$task --model transformer:4,4,96 --lr 0.001953125 --out $OUT/keys_transformer-SEED
END
lanes <<END
$measure --rope-scale 1 4 16 --ckpt $OUT/keys_transformer-SEED/ckpt.pt
END

run python -m lab.retrieval --out $OUT/report/passkey.png \
    $OUT/keys_multiscreen-?/passkey.tsv $OUT/keys_transformer-?/passkey.tsv
