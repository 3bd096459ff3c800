# The paper's evaluation for two cores and a night: LANES=2 bash runs/small.sh
# Models of 0.02M to 1.2M parameters, of Python's own source in bytes, of ABCDigits, of passkey:
# small models of text find no needle. `ablations` comes after `abcdigits`. runs/lib.sh: how to use
OUT=${OUT:-out/small}
FIGURES="scaling lr_sweep sanity text abcdigits passkey ablations latency"
. "$(dirname "$0")/lib.sh"
LONG="--seq-len 128 --batch-size 8 --steps 2000 --warmup 125 --log-every 1"
SHORT="--seq-len 128 --batch-size 8 --steps 1000 --warmup 62 --log-every 2"
ABLATED="--psi 6 --seq-len 128 --batch-size 8 --steps 1000 --warmup 250 --log-every 50"
ABC="--data abcdigits --digits 2 --steps 2400 --layers 4 --lr 0.015625"
KEYS="--data passkey --seq-len 512 --steps 1200"
SIZES="2,2,28 2,2,48 3,4,64 4,4,80"

scaling() {
    for n in 0 1 2; do
        each "3 4 5 6" train --psi @ --seed $n $LONG --out $OUT/multiscreen_psi@-$n
        each "$SIZES" train --model transformer:@ --seed $n $LONG --out $OUT/transformer_@-$n
    done
    run $E.scaling --out $REPORT $OUT/multiscreen_psi{3,4,5,6}-{0,1,2} \
        $OUT/transformer_{2\,2\,28,2\,2\,48,3\,4\,64,4\,4\,80}-{0,1,2}
}
lr_sweep() {
    local size=transformer:8,4,48 rates="0.0009765625 0.00390625 0.015625 0.0625 0.25 1"
    for n in 0 1 2; do
        each "$rates" train --psi 5 --lr @ --seed $n $SHORT --out $OUT/multiscreen_lr@-$n
        each "$rates" train --model $size --lr @ --seed $n $SHORT --out $OUT/transformer_lr@-$n
    done
    each "$rates" train --model $size:qknorm --lr @ --seed 0 $SHORT --out $OUT/qknorm_lr@-0
    run $E.lr_sweep --out $REPORT \
        $OUT/{multiscreen,transformer}_lr{0.0009765625,0.00390625,0.015625,0.0625,0.25,1}-{0,1,2} \
        $OUT/qknorm_lr{0.0009765625,0.00390625,0.015625,0.0625,0.25,1}-0
    run $E.training_curves --out $REPORT \
        $OUT/{multiscreen,transformer,qknorm}_lr{0.0009765625,0.00390625,0.015625,0.0625,0.25,1}-0
}
sanity() {
    local size="--model transformer:3,4,64"
    each "0 1 2" train $size --seed @ $LONG --out $OUT/transformer_3,4,64-@
    each "0 1 2" train $size --weight-decay 0 --seed @ $LONG --out $OUT/no_decay-@
    each "0 1 2" train $size --clip 0 --seed @ $LONG --out $OUT/no_clipping-@
    each "0 1 2" train --psi 5 --seed @ $LONG --out $OUT/multiscreen_psi5-@
    run $E.sanity --out $REPORT \
        $OUT/{transformer_3\,4\,64,no_decay,no_clipping,multiscreen_psi5}-{0,1,2}
    run $E.training_curves --name sanity_curves --window 64 --out $REPORT \
        $OUT/{transformer_3\,4\,64,no_decay,no_clipping,multiscreen_psi5}-0
}
text() {
    local X=$OUT/text_multiscreen Y=$OUT/text_transformer
    each "0 1 2" train --psi 8 --seed @ --steps 620 --out $X-@
    each "0 1 2" train --model transformer:8M --seed @ --steps 620 --out $Y-@
    each "0 1 2" run $E.perplexity --length 8192 --ckpt $X-@/ckpt.pt
    each "0 1 2" run $E.perplexity --length 8192 --rope-scale 1 4 16 --ckpt $Y-@/ckpt.pt
    run $E.sanity --name text_losses --out $REPORT {$Y,$X}-{0,1,2}
    run $E.long_context {$X,$Y}-{0,1,2}/perplexity.tsv --out $REPORT/long_context.png
    each "windows relevance_maps" run $E.@ --ckpt $X-0/ckpt.pt
}
abcdigits() {
    local X=$OUT/needles_original Y=$OUT/needles_transformer seeds="0 1 2 3 4 5 6 7"
    each "$seeds" train --seed @ $ABC --out $X-@
    each "$seeds" run python abcdigits.py --lengths 256 2048 8192 --trials 40 --ckpt $X-@/ckpt.pt
    each "$seeds" run python abcdigits.py --lengths 512 1024 4096 --trials 10 --ckpt $X-@/ckpt.pt
    each "$seeds" run python abcdigits.py --lengths 16384 32768 --trials 1 --ckpt $X-@/ckpt.pt
    each "$seeds" run python abcdigits.py --lengths 256 2048 --trials 10 --swe --ckpt $X-@/ckpt.pt
    each "$seeds" run python abcdigits.py --lengths 8192 --trials 2 --swe --ckpt $X-@/ckpt.pt
    run python abcdigits.py --lengths 16384 32768 --trials 1 --swe --ckpt $X-2/ckpt.pt
    each "0 1 2" train --model transformer:4,4,96 --data abcdigits --digits 2 --steps 3000 \
        --lr 0.001953125 --seed @ --out $Y-@
    each "0 1 2" run python abcdigits.py --lengths 256 512 1024 2048 --trials 20 \
        --rope-scale 1 2 4 --ckpt $Y-@/ckpt.pt
    run $E.retrieval {$X-{0,1,2,3,4,5,6,7},$Y-{0,1,2}}/abcdigits.tsv --out $REPORT/abcdigits.png
}
passkey() {
    local X=$OUT/keys_multiscreen Y=$OUT/keys_transformer all="--lengths 512 1024 2048 4096 8192"
    each "0 1 2" train $KEYS --layers 4 --lr 0.015625 --seed @ --out $X-@
    each "0 1 2" train --model transformer:4,4,96 $KEYS --lr 0.001953125 --seed @ --out $Y-@
    each "0 1 2" run $E.passkey $all --ckpt $X-@/ckpt.pt
    each "0 1 2" run $E.passkey $all --swe --ckpt $X-@/ckpt.pt
    each "0 1 2" run $E.passkey $all --rope-scale 1 4 16 --ckpt $Y-@/ckpt.pt
    run $E.retrieval {$X,$Y}-{0,1,2}/passkey.tsv --out $REPORT/passkey.png
}
ablations() {
    local rest="nope no-tanhnorm no-gate fixed-r" grid="--lengths 256 512 1024 2048 --trials 40"
    for n in 0 1 2; do
        train $ABLATED --seed $n --out $OUT/loss_original-$n
        each "rope $rest" train --model multiscreen:@ $ABLATED --seed $n --out $OUT/loss_@-$n
        each "original $rest" run $E.perplexity --length 4096 --ckpt $OUT/loss_@-$n/ckpt.pt
        run $E.perplexity --length 4096 --rope-scale 1 4 16 --ckpt $OUT/loss_rope-$n/ckpt.pt
        each "rope $rest" train --model multiscreen:@ $ABC --seed $n --out $OUT/needles_@-$n
        each "$rest" run python abcdigits.py $grid --ckpt $OUT/needles_@-$n/ckpt.pt
        run python abcdigits.py $grid --rope-scale 1 4 --ckpt $OUT/needles_rope-$n/ckpt.pt
        each "rope $rest" run python abcdigits.py $grid --swe --ckpt $OUT/needles_@-$n/ckpt.pt
    done
    run $E.ablations --out $REPORT \
        $OUT/loss_{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}
    run $E.long_context --out $REPORT/long_context_ablations.png \
        $OUT/loss_{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}/perplexity.tsv
    run $E.retrieval --out $REPORT/abcdigits_ablations.png \
        $OUT/needles_{original,rope,nope,no-tanhnorm,no-gate,fixed-r}-{0,1,2}/abcdigits.tsv
}
latency() { run $E.latency --out $REPORT && run $E.latency_curves $REPORT/latency.tsv; }
main "$@"
