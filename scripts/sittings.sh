#!/usr/bin/env bash
# A simulated SO-101 learns to lift a cube from a person in sittings, by commands of the command line: `scripts/sittings.sh SEED
# [FOLDER]`. Twenty demonstrations, SFT of moves; then sittings of sixty episodes, in which a scripted person helps where the policy
# is stuck, each followed by SFT that goes on from that policy with all that people did so far. Every policy is judged on a hundred
# held-out cubes without help. In virtual time, in FOLDER (outputs/sittings_SEED), with a summary.tsv; the same command goes on
# where it was interrupted.
set -euo pipefail
seed=$1
at=${2:-outputs/sittings_$seed}
sittings=${SITTINGS:-3} episodes=60
vla() { .venv/bin/vla-rl "$@" threads=1; }
first=$((1000 + seed % 9000)) # of the cubes' places in training, of which the demonstrations have the first twenty
mkdir -p "$at"

# robot and person: minutes of the episodes before, and of them under a person's hand (20 control steps a second)
judged() {
    [ -f "$at/eval_$1.json" ] || vla eval "$at/policy_$1/checkpoints/sft" --suite so101 --episodes 100 --json "$at/eval_$1.json" \
        'env.tasks=[lift_cube]' env.horizon=200 slots.workers=1
    { for ((j = 1; j <= $1; j++)); do cat "$at/sitting_$j.log"; done; } | awk -v sitting="$1" '
        /^episode [0-9]+:/ { for (i = 2; i <= NF; i++) { if ($i == "by") steps += $(i - 1); if ($i ~ /^s[;,]$/) robot += $(i - 1) } }
        END { printf "%s\t%.1f\t%.1f\t", sitting, robot / 60, steps / 20 / 60 }' >>"$at/summary.tsv.part"
    .venv/bin/python -c "import json, sys; print(round(100 * json.load(open(sys.argv[1]))['total']['rate']))" \
        "$at/eval_$1.json" >>"$at/summary.tsv.part"
}
sft() { # SITTING DATASETS UPDATES [key=value ...]
    [ -f "$at/policy_$1/report.html" ] || vla train run=sft output_dir="$at" name="policy_$1" seed="$seed" "dataset=[$2]" \
        env.actions=delta sft.updates="$3" sft.validation_episodes=0 'phases=[sft,report]' wandb=false "${@:4}"
}

printf 'sitting\trobot_minutes\tperson_minutes\tsuccess_of_100\n' >"$at/summary.tsv.part"
[ -f "$at/demonstrations/report.html" ] || vla train run=so101_sim output_dir="$at" name=demonstrations seed="$seed" \
    collect.episodes_per_task=20 collect.speed=0.3 collect.horizon=250 sft.validation_episodes=0 'phases=[collect,report]' wandb=false
data=$at/demonstrations/dataset
sft 0 "$data" 1000 policy=nano_flow
judged 0
for ((k = 1; k <= sittings; k++)); do
    before=$at/policy_$((k - 1))/checkpoints/sft
    if [ ! -d "$at/data_$k" ]; then
        rm -rf "$at/session_$k"
        tasks=$(seq -s, -f 'lift_cube/%.0f' $((first + (k - 1) * episodes)) $((first + k * episodes - 1)))
        vla robot run --lockstep --episodes "$episodes" output_dir="$at" name="session_$k" checkpoint="$before" robot=so101_sim \
            robot.horizon=250 "robot.tasks=[$tasks]" operator=stuck operator.seed=$((seed + k)) | tee "$at/sitting_$k.log"
        .venv/bin/vla-rl robot export "$at/session_$k" "$at/data_$k"
    fi
    data=$data,$at/data_$k
    sft "$k" "$data" $((k < sittings ? 500 : 1000)) sft.start="$before"
    judged "$k"
done
mv "$at/summary.tsv.part" "$at/summary.tsv"
column -t -s "$(printf '\t')" "$at/summary.tsv"
