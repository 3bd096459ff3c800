# What the scripts share; you can skip it. `run` runs a command. `lanes` runs those on its input,
# one per line, LANES at a time, and a line with the word SEED once for each of SEEDS. A failure
# stops no other command and is listed at the end; a run that diverges is not a failure. Finished
# work is not repeated: train.py gets --resume, so after Ctrl-C you can rerun a script to go on.
cd "$(dirname "$0")/../.." || exit 1
OUT=${OUT:-out/small}
SEEDS=${SEEDS:-0 1 2}
# One thread per process, so that the numbers do not depend on the number of cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 OUT

run() {
    echo "+ $*"
    "$@"
    case $? in
        0 | 3 | 130) ;;    # done, diverged, Ctrl-C
        *) echo "$*" >>"$FAILED"; return 1 ;;
    esac
}
export -f run

lanes() {
    # If all are stopped, `cat` stays until the last command has saved its checkpoint.
    each_seed | xargs -L 1 -P "${LANES:-1}" bash -c 'trap "exit 130" INT; run "$@"' lane |
        (trap '' INT TERM HUP; cat)
}

each_seed() {
    while read -r line; do
        for seed in $SEEDS; do echo "${line//SEED/$seed}"; done | uniq
    done
}

list_failures() {
    local code=$?
    if [ -s "$FAILED" ]; then
        echo "failed:"
        cat "$FAILED"
        code=1
    fi
    rm -f "$FAILED"
    exit $code
}

trap 'exit 130' INT
# A script that another script runs leaves the list of failures to it.
if [ -z "$FAILED" ]; then
    FAILED=$(mktemp) || exit 1
    export FAILED
    trap list_failures EXIT
fi
