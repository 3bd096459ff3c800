# What a sceptic asks of the report: LANES=2 bash runs/controls.sh. See runs/lib.sh.
#   tuning    which small Transformer is the strongest at length, and at which rate? seeds 20, 21
#   beyond    the two chosen kinds at their rates, on seeds on which nothing was tuned
#   corners   is it softmax, or is it RoPE? both in one architecture; then r = 1, then NoPE
#   passkey   seeds on which nothing was tuned
FIGURES="tuning beyond corners passkey"
. "$(dirname "$0")/lib.sh"
RECIPE="--data abcdigits --digits 2 --w-th 16 --lr 0.015625 --layers 4 --steps 4800"
KEYS="--data passkey --seq-len 512 --batch-size 4 --steps 6000 --w-th 8192 --layers 4 --lr 0.015625"
T="--data abcdigits --digits 2 --steps 8000 --model transformer:4,4,96"
SCALES="--rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32"
needles() {    # FOLDER "TRAINING FLAGS" "MEASURING FLAGS": train it to retrieve, then measure it
    train $2 --out $OUT/$1
    run python abcdigits.py $3 --ckpt $OUT/$1/ckpt.pt
}
tuning() {
    local to_2048="--lengths 256 512 1024 2048 --trials 20"
    for lr in 0.00390625 0.015625 0.0009765625 0.00048828125; do
        for kind in nope local ssmax; do
            each "20 21" needles tune_${kind}_$lr-@ "$T:$kind --lr $lr --seed @" "$to_2048"
        done
        each "20 21" needles tune_rope_$lr-@ "$T --lr $lr --seed @" "$to_2048 $SCALES"
    done
}
beyond() {
    each "24 25 26 27 28 29 30 31" needles t-local-@ "$T:local --lr 0.0009765625 --seed @"
    each "24 25 26 27 28 29 30 31" needles t-rope-@ "$T --lr 0.00048828125 --seed @" "$SCALES"
}
corners() {
    for name in rope softmax-rope; do
        each "24 25 26" needles $name-@ "$RECIPE --model multiscreen:$name --seed @" "$SCALES"
    done
    for name in fixed-r nope; do
        each "24 25 26" needles $name-@ "$RECIPE --model multiscreen:$name --seed @"
    done
    each "$(echo {rope,softmax-rope,fixed-r,nope}-2{4,5,6})" run python abcdigits.py --swe \
        --ckpt $OUT/@/ckpt.pt
}
passkey() {
    local all="--lengths 512 1024 2048 4096 8192"
    each "3 4 5" train $KEYS --seed @ --out $OUT/keys-@
    for swe in "" --swe; do each "3 4 5" run $E.passkey $all $swe --ckpt $OUT/keys-@/ckpt.pt; done
}
main "$@"
