# Twelve ways to attend on one backbone, and Multiscreen of the same size: docs/mechanisms.md.
#
#     bash runs/mechanisms.sh tune           rates and what a mechanism needs of its own, on seed 20
#     bash runs/mechanisms.sh                the report's seeds, at the rates in the table below
#
# LANES=2 trains two at a time; TRAIN and MEASURE have more flags of train.py and of the measures.
OUT=${OUT:-out/mechanisms} SEEDS=${SEEDS:-32 33 34}
. "$(dirname "$0")/lib.sh"
set -a    # what follows is known in each lane

# Task, mechanism, log2 of the rate: what won on seed 20. "nope" never looked anything up.
WON="text softmax -8, text nope -10, text local -8, text alibi-steep -10, text ssmax-rope -8,
text off-by-one -8, text sigmoid-fixed -10, text entmax -10, text stick-breaking -10,
text forgetting -10, text selective -10, text screening-wide -8, text multiscreen-16 -6,
task screening -10, task local -11, task forgetting-late -12, task softmax -11,
task stick-breaking -11, task selective -11, task alibi -11, task multiscreen-16 -8,
task ssmax-rope -11, task off-by-one -11, task sigmoid -11, task entmax -11, task nope -10"

# Train NAME on a task with seed SEED at the rate 2^EXPONENT.
train() {
    local task=$1 name=$2 exponent=$3 seed=$4 out=$5 model
    case $name in
        multiscreen) model="--layers 4 --tiles 4 --d-E 72" ;;
        multiscreen-16) model="--layers 4 --tiles 4 --d-E 72 --w-th 16" ;;
        softmax) model="--model transformer:4,4,72" ;;
        *) model="--model transformer:4,4,72:$name" ;;
    esac
    case $task in
        text) model+=" --seq-len 128 --steps 1000 --eval-every 500" ;;
        task) model+=" --data abcdigits --digits 2 --seq-len 256 --steps ${6:-4800}" ;;
    esac
    run python train.py --resume $model --lr $(awk "BEGIN { printf \"%.12g\", 2^$exponent }") --seed $seed \
        $TRAIN --out $out
}

# A run of the report, and its measures, also with what an inference-time step gives.
one() {
    local task=$1 name=$2 out=$OUT/$1_$2-$4 measure step steps=("")
    train $task $name $3 $4 $out && [ ! -f $out/diverged.txt ] || return 0
    case $task in
        text) measure="python -m experiments.perplexity --length 2048" ;;
        task) measure="python abcdigits.py --lengths 256 1024 4096 --trials 10" ;;
    esac
    case $name in
        screening* | multiscreen*) steps+=(--swe) ;;
        softmax) steps+=("--rope-scale 4 8 16 ntk4 ntk16 ntk64") ;;
    esac
    for step in "${steps[@]}"; do run $measure $step $MEASURE --ckpt $out/ckpt.pt; done
}

# The last value of a column in a run's log, or 99 if there is none, or it diverged.
last_of() {
    [ -f "$1/diverged.txt" ] && echo 99 && return
    awk -F '\t' -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i }
        NR > 1 && $c != "" { x = $c } END { print x == "" ? 99 : x }' "$1/log.tsv"
}

# Train on seed 20. A run that looks nothing up after 2,500 steps is stopped.
try() {
    local out=$OUT/tune_$1/$2$3
    [ -f $out/goes_on ] || train $1 $2 $3 20 $out 2500 || return
    [ $1 = text ] && return
    awk "BEGIN { x = $(last_of $out needle); exit !(x > 0.2 && x <= 1) }" && touch $out/goes_on
    [ ! -f $out/goes_on ] || run python train.py --resume --steps 4800 $TRAIN --out $out
}

# The lowest last validation loss over the rates. While an edge wins, try one rate further, but
# stop where all diverge.
tune() {
    local task=$1 name=$2 step=$3 rates=${*:4} best exponent
    while true; do
        for exponent in $rates; do try $task $name $exponent || return 0; done
        best=$(for exponent in $rates; do
            echo "$(last_of $OUT/tune_$task/$name$exponent val_loss) $exponent"
        done | sort -g | head -1)
        [ "${best% *}" != 99 ] || break
        case " $rates " in
            " ${best#* } "*) rates="$((${best#* } - step)) $rates" ;;
            *" ${best#* } ") rates="$rates $((${best#* } + step))" ;;
            *) break ;;
        esac
    done
    echo "$task $name $best" | tee -a $OUT/tuned.txt
}

if [ "$1" = tune ]; then
    for name in softmax nope local alibi ssmax-rope off-by-one sigmoid entmax stick-breaking \
        forgetting selective screening multiscreen alibi-steep sigmoid-fixed forgetting-late \
        screening-wide screening-slow multiscreen-16; do
        echo tune text $name 2 -10 -8 -6
        echo tune task $name 1 -10 -8
    done | lanes
    sort -u $OUT/tuned.txt
    exit
fi

echo "$WON" | tr ',' '\n' | while read -r task; do [ "$task" ] && echo one $task SEED; done | lanes
# A row for each mechanism, whichever of its tries won: text_alibi-steep and task_alibi are alibi's.
for name in softmax nope local alibi ssmax-rope off-by-one sigmoid entmax stick-breaking forgetting \
    selective screening; do
    rows+=" $name=$OUT/text_$name* $name=$OUT/task_$name*"
done
run python -m experiments.mechanisms $rows $OUT/text_multiscreen* $OUT/task_multiscreen* \
    --out $OUT/report/mechanisms.png
