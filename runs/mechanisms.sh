# Twelve ways to attend on one backbone, and Multiscreen of the same size: docs/mechanisms.md.
#
#     bash runs/mechanisms.sh tune           rates and what a mechanism needs of its own, on seed 20
#     bash runs/mechanisms.sh                the report's seeds, at the rates in the table below
#
# LANES=2 trains two at a time; TRAIN and MEASURE have more flags of train.py and of the measures.
OUT=${OUT:-out/mechanisms}
. "$(dirname "$0")/lib.sh"

TEXT="--seq-len 128 --steps 1000 --eval-every 500"
TASK="--data abcdigits --digits 2 --seq-len 256"

# The flags of a mechanism's model.
flags_of() {
    case $1 in
        multiscreen) echo "--layers 4 --tiles 4 --d-E 72" ;;
        multiscreen-16) echo "--layers 4 --tiles 4 --d-E 72 --w-th 16" ;;
        softmax) echo "--model transformer:4,4,72" ;;
        *) echo "--model transformer:4,4,72:$1" ;;
    esac
}

# The last value of a column in a run's log, or 99 if there is none, or it diverged.
last_of() {
    [ -f "$1/diverged.txt" ] && echo 99 && return
    awk -F '\t' -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i }
        NR > 1 && $c != "" { x = $c } END { print x == "" ? 99 : x }' "$1/log.tsv"
}

# Train NAME on a task with seed SEED at the rate 2^EXPONENT.
train() {
    local task=$1 name=$2 exponent=$3 seed=$4 out=$5 rate
    rate=$(awk "BEGIN { printf \"%.12g\", 2^$exponent }")
    local command="python train.py $(flags_of $name) --lr $rate --seed $seed $TRAIN --out $out"
    if [ $task = text ]; then
        run $command $TEXT
    elif [ $seed != 20 ]; then
        run $command $TASK --steps 4800
    else
        # In tuning a run that looks nothing up after 2,500 steps is stopped.
        run $command $TASK --steps 2500
        if awk "BEGIN { x = $(last_of $out needle); exit !(x > 0.2 && x <= 1) }"; then
            run python train.py --resume --steps 4800 $TRAIN --out $out
        fi
    fi
}

# The lowest last validation loss over the rates. While an edge wins, try one rate further.
tune() {
    local task=$1 name=$2 step=$3 rates=${*:4} best
    while true; do
        for exponent in $rates; do
            out=$OUT/tune_$task/$name$exponent
            [ -f $out/tuned ] || train $task $name $exponent 20 $out
            mkdir -p $out
            touch $out/tuned $out/log.tsv
        done
        best=$(for exponent in $rates; do
            echo "$(last_of $OUT/tune_$task/$name$exponent val_loss) $exponent"
        done | sort -g | head -1)
        case " $rates " in
            " ${best#* } "*) rates="$((${best#* } - step)) $rates" ;;
            *" ${best#* } ") rates="$rates $((${best#* } + step))" ;;
            *) break ;;
        esac
    done
    echo "$task $name $best" | tee -a $OUT/tuned.txt
}

if [ "$1" = tune ] && [ -n "$2" ]; then
    tune text $2 2 -10 -8 -6
    tune task $2 1 -10 -8
    exit
fi
if [ "$1" = tune ]; then
    for name in softmax nope local alibi ssmax-rope off-by-one sigmoid entmax stick-breaking \
        forgetting selective screening multiscreen alibi-steep sigmoid-fixed forgetting-late \
        screening-wide screening-slow multiscreen-16; do
        echo bash runs/mechanisms.sh tune $name
    done | lanes
    sort $OUT/tuned.txt
    exit
fi

# Measure a run of the report, also with what an inference-time step gives.
measure() {
    local command="python -m experiments.perplexity --length 2048" steps=("")
    [ $1 = task ] && command="python abcdigits.py --lengths 256 1024 4096 --trials 10"
    case $2 in
        screening* | multiscreen*) steps+=(--swe) ;;
        softmax) steps+=("--rope-scale 4 8 16 ntk4 ntk16 ntk64") ;;
    esac
    for step in "${steps[@]}"; do
        run $command $step $MEASURE --ckpt $3/ckpt.pt
    done
}

if [ "$1" = one ]; then
    out=$OUT/$2_$3-$5
    train $2 $3 $4 $5 $out
    [ -f $out/diverged.txt ] || measure $2 $3 $out
    exit
fi

# Task, mechanism, log2 of the rate: what won on seed 20. "nope" never looked anything up.
WON="text softmax -8, text nope -10, text local -8, text alibi-steep -10, text ssmax-rope -8,
text off-by-one -8, text sigmoid-fixed -10, text entmax -10, text stick-breaking -10,
text forgetting -10, text selective -10, text screening-wide -8, text multiscreen-16 -6,
task screening -10, task local -11, task forgetting-late -12, task softmax -11,
task stick-breaking -11, task selective -11, task alibi -11, task multiscreen-16 -8,
task ssmax-rope -11, task off-by-one -11, task sigmoid -11, task entmax -11, task nope -10"

for seed in ${SEEDS:-32 33 34}; do
    echo "$WON" | tr ',' '\n' | tr -s '\n' | while read -r task name exponent; do
        [ -n "$task" ] && echo bash runs/mechanisms.sh one $task $name $exponent $seed
    done
done | lanes
run python -m experiments.mechanisms $OUT/text_* $OUT/task_* --out $OUT/report/mechanisms.png
