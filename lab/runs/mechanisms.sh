# Twelve ways to attend on one backbone, and Multiscreen of the same size: docs/mechanisms.md.
#
#     bash lab/runs/mechanisms.sh tune     tunes rates and each mechanism's own settings, on seed 20
#     bash lab/runs/mechanisms.sh          trains the report's seeds, at the rates in WON below
#
# LANES=2 trains two at a time. TRAIN and MEASURE may hold more flags for training and measuring.
OUT=${OUT:-out/mechanisms} SEEDS=${SEEDS:-32 33 34}
. "$(dirname "$0")/lib.sh"
set -a    # what follows is known in each lane

# What won on seed 20: task, mechanism, log2 of the rate. No rate taught "nope" to look things up.
WON="text softmax -8, text nope -10, text local -8, text alibi-steep -10, text ssmax-rope -8,
text off-by-one -8, text sigmoid-fixed -10, text entmax -10, text stick-breaking -10,
text forgetting -10, text selective -10, text screening-wide -8, text multiscreen-16 -6,
task screening -10, task local -11, task forgetting-late -12, task softmax -11,
task stick-breaking -11, task selective -11, task alibi -11, task multiscreen-16 -8,
task ssmax-rope -11, task off-by-one -11, task sigmoid -11, task entmax -11, task nope -10"

# The command that trains NAME on a task, without the rate, the seed and the folder.
recipe() {
    local flags
    case $2 in
        multiscreen) flags="--layers 4 --tiles 4 --d-E 72" ;;
        multiscreen-16) flags="--layers 4 --tiles 4 --d-E 72 --w-th 16" ;;
        softmax) flags="--model transformer:4,4,72" ;;
        *) flags="--model transformer:4,4,72:$2" ;;
    esac
    case $1 in
        text) flags+=" --seq-len 128 --steps 1000 --eval-every 500" ;;
        task) flags+=" --data abcdigits --digits 2 --seq-len 256" ;;
    esac
    echo python train.py --resume $flags
}

# Train a run of the report and measure it, also with what can be changed at inference time.
one() {
    local task=$1 name=$2 rate out=$OUT/$1_$2-$4 length= measure step steps=("")
    case $task in
        text) measure="python -m lab.perplexity --length 2048" ;;
        task) length="--steps 4800"
            measure="python abcdigits.py --lengths 256 1024 4096 --trials 10" ;;
    esac
    rate=$(awk "BEGIN { printf \"%.12g\", 2^$3 }")
    run $(recipe $task $name) $length --lr $rate --seed $4 $TRAIN --out $out &&
        [ ! -f $out/diverged.txt ] || return 0
    case $name in
        screening* | multiscreen*) steps+=(--swe) ;;
        softmax) steps+=("--rope-scale 4 8 16 ntk4 ntk16 ntk64") ;;
    esac
    for step in "${steps[@]}"; do run $measure $step $MEASURE --ckpt $out/ckpt.pt; done
}

if [ "$1" = tune ]; then
    for name in softmax nope local alibi ssmax-rope off-by-one sigmoid entmax stick-breaking \
        forgetting selective screening multiscreen alibi-steep sigmoid-fixed forgetting-late \
        screening-wide screening-slow multiscreen-16; do
        echo python lab/runs/tune.py text $name 2 -10 -8 -6 -- $(recipe text $name)
        echo python lab/runs/tune.py task $name 1 -10 -8 -- $(recipe task $name)
    done | lanes
    sort -u $OUT/tuned.txt
    exit
fi

echo "$WON" | tr ',' '\n' | while read -r task; do [ "$task" ] && echo one $task SEED; done | lanes
# A row for each mechanism, whichever of its tries won: text_alibi-steep and task_alibi are alibi's.
for name in softmax nope local alibi ssmax-rope off-by-one sigmoid entmax stick-breaking \
    forgetting selective screening; do
    rows+=" $name=$OUT/text_$name* $name=$OUT/task_$name*"
done
run python -m lab.mechanisms $rows $OUT/text_multiscreen* $OUT/task_multiscreen* \
    --out $OUT/report/mechanisms.png
