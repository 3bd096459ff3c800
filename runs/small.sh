# The paper's evaluation for two cores and some nights: LANES=2 bash runs/small.sh. See runs/lib.sh.
FIGURES="scaling lr_sweep sanity text abcdigits competition passkey ablations latency"
. "$(dirname "$0")/lib.sh"
LONG="--seed @ --seq-len 128 --batch-size 8 --steps 2000 --warmup 125 --log-every 1"
HALF="--seed @ --seq-len 128 --batch-size 8 --steps 1000 --warmup 62 --log-every 2"
DEEP="--seed 0 --seq-len 128 --batch-size 8 --steps 6000 --warmup 188 --log-every 1"
ABLATED="--psi 6 --seq-len 128 --batch-size 8 --steps 1000 --warmup 250 --log-every 50"
RECIPE="--w-th 16 --lr 0.015625 --layers 4 --model multiscreen"   # it was tuned on seeds 0 to 23
KEYS="--data passkey --seq-len 512 --batch-size 4 --steps 6000"   # they end when learned
scaling() {
    local X=$OUT/multiscreen_psi Y=$OUT/transformer_ sizes="2,2,28 2,2,48 3,4,64 4,4,80"
    for lr in 0.015625 0.0625 0.25; do for n in 3 4 5 6; do        # the paper's is the second
        each "0 1 2" train --psi $n --lr $lr $LONG --out $X${n}_lr$lr-@; done; done
    for lr in 0.00025 0.001 0.00390625 0.015625; do for n in $sizes; do    # the second, too
        each "0 1 2" train --model transformer:$n --lr $lr $LONG --out $Y${n}_lr$lr-@; done; done
    run $E.scaling --out $REPORT ${X}{3,4,5,6}_lr{0.015625,0.0625,0.25}-{0,1,2} \
        ${Y}{2\,2\,28,2\,2\,48,3\,4\,64,4\,4\,80}_lr{0.00025,0.001,0.00390625,0.015625}-{0,1,2}
}
lr_sweep() {
    for r in 0.0009765625 0.00390625 0.015625 0.0625 0.25 1; do
        each "0 1 2" train --psi 5 --lr $r $HALF --out $OUT/multiscreen_lr$r-@
        each "0 1 2" train --model transformer:8,4,48 --lr $r $HALF --out $OUT/transformer_lr$r-@
        each "0 1 2" train --model transformer:8,4,48:qknorm --lr $r $HALF --out $OUT/qknorm_lr$r-@
    done
    run $E.compare --by lr --name lr_sweep --out $REPORT "Transformer=$OUT/transformer_lr*-?" \
        "Transformer + QKNorm=$OUT/qknorm_lr*-?" "Multiscreen=$OUT/multiscreen_lr*-?"
    run $E.compare --name curves --out $REPORT \
        "Multiscreen, 2^-8=$OUT/multiscreen_lr0.00390625-0" \
        "Transformer, 2^-8=$OUT/transformer_lr0.00390625-0" \
        "Multiscreen, 2^-4=$OUT/multiscreen_lr0.0625-0" \
        "Transformer, 2^-4=$OUT/transformer_lr0.0625-0" \
        "Multiscreen, 1=$OUT/multiscreen_lr1-0" "Transformer, 1=$OUT/transformer_lr1-0"
    each "0.0625 0.125" train --psi 5 --layers 16 --lr @ $DEEP --out $OUT/deep_multiscreen@
    each "0.0625 0.125" train --model transformer:16,4,48 --lr @ $DEEP --out $OUT/deep_transformer@
    run $E.compare --by lr --name deep --window 64 --out $REPORT \
        "Transformer, 16 layers=$OUT/deep_transformer*" "Multiscreen, 16 layers=$OUT/deep_multiscreen*"
}
sanity() {
    each "0 1 2" train --model transformer:3,4,64 $LONG --weight-decay 0 --out $OUT/no_decay-@
    each "0 1 2" train --model transformer:3,4,64 $LONG --clip 0 --out $OUT/no_clipping-@
    run $E.compare --name sanity --window 64 --out $REPORT \
        "Transformer=$OUT/transformer_3,4,64_lr0.001-?" \
        "Transformer, no weight decay=$OUT/no_decay-?" "Transformer, no clipping=$OUT/no_clipping-?" \
        "Multiscreen=$OUT/multiscreen_psi5_lr0.0625-?"
}
text() {
    local X=$OUT/text_multiscreen Y=$OUT/text_transformer
    each "0 1 2" train --psi 8 --seed @ --steps 620 --out $X-@
    each "0 1 2" train --psi 8 --w-th 16 --seed @ --steps 620 --out $X-w_th16-@
    each "0 1 2" train --model transformer:8M --seed @ --steps 620 --out $Y-@
    each "$(echo {,w_th16-}{0,1,2})" run $E.perplexity --length 8192 --ckpt $X-@/ckpt.pt
    each "0 1 2" run $E.perplexity --length 8192 --rope-scale 1 4 16 ntk4 ntk16 --ckpt $Y-@/ckpt.pt
    run $E.compare --name text_losses --out $REPORT "Transformer=$Y-?" "Multiscreen=$X-?" \
        "Multiscreen, w_th 16=$X-w_th16-?"
    run $E.perplexity {$X,$Y}-{0,1,2}/perplexity.tsv --out $REPORT/long_context.png
    run $E.perplexity $X-w_th16-{0,1,2}/perplexity.tsv --out $REPORT/long_context_w_th16.png
    run $E.tiles --ckpt $X-0/ckpt.pt
}
needles() {    # NAME SEED "TRAINING FLAGS" "MEASURING FLAGS": train it to retrieve, then measure it
    local X=$OUT/needles_$1-$2
    train --data abcdigits --digits 2 --steps 4800 --seed $2 $3 --out $X
    run python abcdigits.py $4 --ckpt $X/ckpt.pt
    [ $1 = transformer ] || run python abcdigits.py $4 --swe --ckpt $X/ckpt.pt
}
abcdigits() {
    each "24 25 26 27 28 29 30 31" needles original @ "$RECIPE" \
        "--lengths 256 512 1024 2048 4096 8192 16384 32768"
    each "24 25 26" needles transformer @ "--model transformer:4,4,96 --lr 0.001953125" \
        "--lengths 256 512 1024 2048 --trials 20 --rope-scale 1 2 4 ntk2 ntk4"
    run $E.retrieval --out $REPORT/abcdigits.png \
        $OUT/needles_{original-{24..31},transformer-{24..26}}/abcdigits.tsv
}
competition() {
    for name in compete softmax; do each "24 25 26" needles $name @ "$RECIPE:$name"; done
    run $E.retrieval --out $REPORT/competition.png \
        $OUT/needles_{original,compete,softmax}-2{4,5,6}/abcdigits.tsv
}
passkey() {
    local X=$OUT/keys_multiscreen Y=$OUT/keys_transformer all="--lengths 512 1024 2048 4096 8192"
    each "0 1 2" train $KEYS --w-th 8192 --layers 4 --lr 0.015625 --seed @ --out $X-@
    each "0 1 2" train --model transformer:4,4,96 $KEYS --lr 0.001953125 --seed @ --out $Y-@
    for swe in "" --swe; do each "0 1 2" run $E.passkey $all $swe --ckpt $X-@/ckpt.pt; done
    each "0 1 2" run $E.passkey $all --rope-scale 1 4 16 --ckpt $Y-@/ckpt.pt
    run $E.retrieval {$X,$Y}-{0,1,2}/passkey.tsv --out $REPORT/passkey.png
}
ablations() {
    local names="rope nope no-tanhnorm no-gate fixed-r compete softmax" X=$OUT/needles
    for n in 0 1 2; do
        train $ABLATED --seed $n --out $OUT/loss_original-$n
        each "$names" train --model multiscreen:@ $ABLATED --seed $n --out $OUT/loss_@-$n
        each "original $names" run $E.perplexity --length 4096 --ckpt $OUT/loss_@-$n/ckpt.pt
        run $E.perplexity --length 4096 --rope-scale 4 16 ntk4 --ckpt $OUT/loss_rope-$n/ckpt.pt
    done
    for n in nope no-tanhnorm fixed-r; do each "24 25 26" needles $n @ "$RECIPE:$n"; done
    each "24 25 26" needles rope @ "$RECIPE:rope" "--rope-scale 1 2 4 ntk2 ntk4"
    for r in 0.0078125 0.015625 0.03125; do each "24 25 26" needles no-gate_$r @ \
            "--w-th 16 --lr $r --layers 5 --model multiscreen:no-gate"
        run $E.retrieval --out $REPORT/no_gate_lr$r.png ${X}_no-gate_$r-2{4,5,6}/abcdigits.tsv
    done
    local runs=($OUT/loss_{original,rope,nope,no-tanhnorm,no-gate,fixed-r,compete,softmax}-{0,1,2})
    run $E.compare --name ablations --out $REPORT "Original=$OUT/loss_original-?" \
        "MiPE → RoPE=$OUT/loss_rope-?" "MiPE → NoPE=$OUT/loss_nope-?" \
        "w/o TanhNorm=$OUT/loss_no-tanhnorm-?" "w/o Gate=$OUT/loss_no-gate-?" \
        "Fixed r = 1=$OUT/loss_fixed-r-?" "Keys compete=$OUT/loss_compete-?" \
        "Softmax=$OUT/loss_softmax-?"
    run $E.perplexity --out $REPORT/long_context_ablations.png "${runs[@]/%//perplexity.tsv}"
    run $E.retrieval --out $REPORT/abcdigits_ablations.png \
        ${X}_{original,rope,nope,no-tanhnorm,no-gate_0.015625,fixed-r}-2{4,5,6}/abcdigits.tsv
}
latency() { run $E.latency --out $REPORT/latency.png; }
main "$@"
